// AVX2, FMA and F16C: a vector of 16 lanes is two registers; products of 8 bits by `vpmaddwd` on
// weights widened to 16 bits, whose sums are exact.
#include "core.h"
#if defined(__AVX2__)
#include <immintrin.h>
#include <math.h>
#include <sched.h>
#include <string.h>

#define OP static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

namespace entmtp {
namespace {

struct F { __m256 a, b; };
struct I { __m256i a, b; };
using L = __m256i;
constexpr int kHeader = 256, kActBytes = 2, kTile = 5, kAhead = 4096, kRegisters = 4, kQueries = 6, kRowGroup = 16, kLanes = 4;

OP F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OP void store(float* p, F v) { _mm256_storeu_ps(p, v.a); _mm256_storeu_ps(p + 8, v.b); }
OP F set1(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
OP float first(F v) { return _mm256_cvtss_f32(v.a); }
OP F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
OP F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
OP F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
OP F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
OP F fma_(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
OP F vmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
OP F vmin(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
OP F vabs(F x) { __m256 s = _mm256_set1_ps(-0.f); return {_mm256_andnot_ps(s, x.a), _mm256_andnot_ps(s, x.b)}; }
OP F neg(F x) { __m256 s = _mm256_set1_ps(-0.f); return {_mm256_xor_ps(s, x.a), _mm256_xor_ps(s, x.b)}; }
OP I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
OP F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
OP I loadi(const int32_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))}; }
OP __m256 scale2(__m256 p, __m256 t) { return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23))); }
OP F scale2(F p, F t) { return {scale2(p.a, t.a), scale2(p.b, t.b)}; }
OP F zero_below(F x, F limit, F y) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_GE_OQ), y.a), _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_GE_OQ), y.b)};
}
OP float hsum(F v) {  // lane i + (i + 8), then + 4, + 2, + 1
    __m256 s = _mm256_add_ps(v.a, v.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
OP float hmax(F v) {
    __m256 s = _mm256_max_ps(v.a, v.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
OP F load_half(const half_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))}; }
OP void store_half(half_t* p, F v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
}
OP void scatter_half(half_t* p, F v) {
    alignas(16) half_t t[16];
    store_half(t, v);
    for (int i = 0; i < 16; i++) p[(size_t)i * kKeyBlock] = t[i];
}
OP void store_act(uint8_t* p, I q) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(q.a, q.b), 0xD8);
    _mm256_storeu_si256((__m256i*)p, packed);
}
OP void pause_() { _mm_pause(); }
OP void yield_() { sched_yield(); }
OP L load_lanes(const uint64_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
OP void store_lanes(uint64_t* p, L v) { _mm256_storeu_si256((__m256i*)p, v); }
OP L set1_lanes(uint64_t x) { return _mm256_set1_epi64x((long long)x); }
OP L mul_low(L x, L y) { return _mm256_mul_epu32(x, y); }
OP L high(L x) { return _mm256_srli_epi64(x, 32); }
OP L xor_(L x, L y) { return _mm256_xor_si256(x, y); }
OP void prefetch(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

#include "stream.inc"

// In assembly, since the compiler would add two products first, and then runs out of registers and
// keeps the sums in memory.
OP void accumulate(__m256i& sum, __m256i product) { __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(product)); }

// Channels 16 * half .. + 15 of R rows. Weights: per pair of k, 16 channels times 2.
template <int R>
static inline void dot_half(const uint8_t* w, const uint8_t* act, int k, int32_t (*out)[kPanel], Stream& ahead) {
    __m256i acc[R][2];
    UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    for (int i = 0; i < k; i += 4, w += 64) {
        fetch(ahead);
        UNROLL for (int half = 0; half < 2; half++) {
            __m256i w0 = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)(w + 32 * half)));
            __m256i w1 = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)(w + 32 * half + 16)));
            UNROLL for (int r = 0; r < R; r++) {
                int32_t pair;
                memcpy(&pair, act + ((size_t)r * k + i + 2 * half) * 2, 4);
                __m256i a = _mm256_set1_epi32(pair);
                accumulate(acc[r][0], _mm256_madd_epi16(a, w0));
                accumulate(acc[r][1], _mm256_madd_epi16(a, w1));
            }
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < 2; c++) _mm256_store_si256((__m256i*)(out[r] + 8 * c), acc[r][c]);
}

template <int R>
static void dot_rows(const uint8_t* panel, const uint8_t* act, int k, int32_t (*out)[kPanel], Stream& ahead) {
    const uint8_t* w = panel + kHeader;
    size_t half = (size_t)k * 16;
    dot_half<R>(w, act, k, out, ahead);
    dot_half<R>(w + half, act, k, (int32_t(*)[kPanel])((int32_t*)out + 16), ahead);
}

static void dot_panel(const uint8_t* panel, const uint8_t* act, int k, int rows, int32_t (*out)[kPanel], Stream ahead) {
    switch (rows) {
        case 1: return dot_rows<1>(panel, act, k, out, ahead);
        case 2: return dot_rows<2>(panel, act, k, out, ahead);
        case 3: return dot_rows<3>(panel, act, k, out, ahead);
        case 4: return dot_rows<4>(panel, act, k, out, ahead);
        default: return dot_rows<5>(panel, act, k, out, ahead);
    }
}

static void pack(const int8_t* rows, int32_t k, uint8_t* panel) {
    for (int c = 0; c < kPanel; c++)
        for (int i = 0; i < k; i++)
            panel[kHeader + (size_t)(c / 16) * k * 16 + (size_t)(i / 2) * 32 + c % 16 * 2 + i % 2] = (uint8_t)rows[(size_t)c * k + i];
}

#include "forward.inc"
#include "noise.inc"

} // namespace

const Isa kAvx2{"avx2", kActBytes, 2, run, pack, dot_again, noise_words, noise_candidates};

} // namespace entmtp
#else
namespace entmtp {
const Isa kAvx2{"avx2", 0, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
} // namespace entmtp
#endif
