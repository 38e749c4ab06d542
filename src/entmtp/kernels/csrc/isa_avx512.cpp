// AVX-512 with VNNI: a vector of 16 lanes is one register; products of 8 bits by `vpdpbusd`, which
// wants one side unsigned: activations are stored + 128 and the sums start from -128 * sum(w).
#include "core.h"
#if defined(__AVX512VNNI__) || defined(ENTMTP_EMULATE_AVX512)
#if defined(ENTMTP_EMULATE_AVX512)
#include "emulate_avx512.h"
#else
#include <immintrin.h>
#endif
#include <math.h>
#include <sched.h>
#include <string.h>

#define OP static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

namespace entmtp {
namespace {

using F = __m512;
using I = __m512i;
using L = __m512i;
constexpr int kHeader = 256, kActBytes = 1, kTile = 8, kAhead = 4096, kRegisters = 16, kQueries = 4, kRowGroup = 16, kLanes = 8;

OP F load(const float* p) { return _mm512_loadu_ps(p); }
OP void store(float* p, F v) { _mm512_storeu_ps(p, v); }
OP F set1(float x) { return _mm512_set1_ps(x); }
OP float first(F v) { return _mm_cvtss_f32(_mm512_castps512_ps128(v)); }
OP F add(F x, F y) { return _mm512_add_ps(x, y); }
OP F sub(F x, F y) { return _mm512_sub_ps(x, y); }
OP F mul(F x, F y) { return _mm512_mul_ps(x, y); }
OP F div(F x, F y) { return _mm512_div_ps(x, y); }
OP F fma_(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
OP F vmax(F x, F y) { return _mm512_max_ps(x, y); }
OP F vmin(F x, F y) { return _mm512_min_ps(x, y); }
OP F vabs(F x) { return _mm512_abs_ps(x); }
OP F neg(F x) { return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0x80000000))); }
OP I to_int(F x) { return _mm512_cvtps_epi32(x); }
OP F to_float(I x) { return _mm512_cvtepi32_ps(x); }
OP I loadi(const int32_t* p) { return _mm512_loadu_si512(p); }
OP F scale2(F p, F t) { return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23))); }
OP F zero_below(F x, F limit, F y) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ), y); }
OP __m256 lower(F v) { return _mm512_castps512_ps256(v); }
OP __m256 upper(F v) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)); }
OP float hsum(F v) {  // lane i + (i + 8), then + 4, + 2, + 1
    __m256 s = _mm256_add_ps(lower(v), upper(v));
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
OP float hmax(F v) {
    __m256 s = _mm256_max_ps(lower(v), upper(v));
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
OP F load_half(const half_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
OP void store_half(half_t* p, F v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
OP void scatter_half(half_t* p, F v) {
    alignas(32) half_t t[16];
    store_half(t, v);
    for (int i = 0; i < 16; i++) p[(size_t)i * kKeyBlock] = t[i];
}
OP void store_act(uint8_t* p, I q) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_add_epi32(q, _mm512_set1_epi32(128)))); }
OP void pause_() { _mm_pause(); }
OP void yield_() { sched_yield(); }
OP L load_lanes(const uint64_t* p) { return _mm512_loadu_si512(p); }
OP void store_lanes(uint64_t* p, L v) { _mm512_storeu_si512(p, v); }
OP L set1_lanes(uint64_t x) { return _mm512_set1_epi64((long long)x); }
OP L mul_low(L x, L y) { return _mm512_mul_epu32(x, y); }
OP L high(L x) { return _mm512_srli_epi64(x, 32); }
OP L xor_(L x, L y) { return _mm512_xor_si512(x, y); }
OP void prefetch(const uint8_t* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

#include "stream.inc"

OP I dot4(I acc, I a, I w) {
#if defined(ENTMTP_EMULATE_AVX512)
    return _mm512_dpbusd_epi32(acc, a, w);
#else
    // in assembly, since GCC 12 copies the sum to a new register around the intrinsic
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(w));
    return acc;
#endif
}

// Weights: per four k, 16 channels times 4, then the other 16 channels.
template <int R>
static void dot_rows(const uint8_t* panel, const uint8_t* act, int k, int32_t (*out)[kPanel], Stream& ahead) {
    const uint8_t* w = panel + kHeader;
    const int32_t* offset = (const int32_t*)(panel + 128);
    I acc[R][2];
    UNROLL for (int r = 0; r < R; r++) acc[r][0] = loadi(offset), acc[r][1] = loadi(offset + 16);
    for (int i = 0; i < k; i += 4, w += 128) {
        fetch(ahead), fetch(ahead);
        I w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
        UNROLL for (int r = 0; r < R; r++) {
            int32_t quad;
            memcpy(&quad, act + (size_t)r * k + i, 4);
            I a = _mm512_set1_epi32(quad);
            acc[r][0] = dot4(acc[r][0], a, w0);
            acc[r][1] = dot4(acc[r][1], a, w1);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < 2; c++) _mm512_storeu_si512(out[r] + 16 * c, acc[r][c]);
}

static void dot_panel(const uint8_t* panel, const uint8_t* act, int k, int rows, int32_t (*out)[kPanel], Stream ahead) {
    switch (rows) {
        case 1: return dot_rows<1>(panel, act, k, out, ahead);
        case 2: return dot_rows<2>(panel, act, k, out, ahead);
        case 3: return dot_rows<3>(panel, act, k, out, ahead);
        case 4: return dot_rows<4>(panel, act, k, out, ahead);
        case 5: return dot_rows<5>(panel, act, k, out, ahead);
        case 6: return dot_rows<6>(panel, act, k, out, ahead);
        case 7: return dot_rows<7>(panel, act, k, out, ahead);
        default: return dot_rows<8>(panel, act, k, out, ahead);
    }
}

static void pack(const int8_t* rows, int32_t k, uint8_t* panel) {
    for (int c = 0; c < kPanel; c++)
        for (int i = 0; i < k; i++)
            panel[kHeader + (size_t)(i / 4) * 128 + (size_t)(c / 16) * 64 + c % 16 * 4 + i % 4] = (uint8_t)rows[(size_t)c * k + i];
}

#include "forward.inc"
#include "noise.inc"

} // namespace

const Isa kAvx512{"avx512", kActBytes, 4, run, pack, dot_again, noise_words, noise_candidates};

} // namespace entmtp
#else
namespace entmtp {
const Isa kAvx512{"avx512", 0, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
} // namespace entmtp
#endif
