// Plain C++: arrays of 16 that a compiler turns into whatever the machine has. The reference for
// the other instruction sets, and what runs where there is none of them.
#include "core.h"
#include <math.h>
#include <string.h>
#include <thread>

#define OP static inline
#define UNROLL
#define EACH for (int i = 0; i < 16; i++)
#define LANES for (int i = 0; i < kLanes; i++)

namespace entmtp {
namespace {

struct F { float v[16]; };
struct I { int32_t v[16]; };
constexpr int kHeader = 256, kActBytes = 1, kTile = 4, kAhead = 4096, kRegisters = 4, kQueries = 4, kRowGroup = 16, kLanes = 1;
struct L { uint64_t v[kLanes]; };

OP F load(const float* p) { F r; memcpy(r.v, p, sizeof r.v); return r; }
OP void store(float* p, F x) { memcpy(p, x.v, sizeof x.v); }
OP F set1(float x) { F r; EACH r.v[i] = x; return r; }
OP float first(F x) { return x.v[0]; }
OP F add(F x, F y) { EACH x.v[i] += y.v[i]; return x; }
OP F sub(F x, F y) { EACH x.v[i] -= y.v[i]; return x; }
OP F mul(F x, F y) { EACH x.v[i] *= y.v[i]; return x; }
OP F div(F x, F y) { EACH x.v[i] /= y.v[i]; return x; }
OP F fma_(F x, F y, F z) { EACH x.v[i] = fmaf(x.v[i], y.v[i], z.v[i]); return x; }
OP F vmax(F x, F y) { EACH x.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i]; return x; }
OP F vmin(F x, F y) { EACH x.v[i] = x.v[i] < y.v[i] ? x.v[i] : y.v[i]; return x; }
OP F vabs(F x) { EACH x.v[i] = fabsf(x.v[i]); return x; }
OP F neg(F x) { EACH x.v[i] = -x.v[i]; return x; }
OP I to_int(F x) { I r; EACH r.v[i] = (int32_t)nearbyintf(x.v[i]); return r; }
OP F to_float(I x) { F r; EACH r.v[i] = (float)x.v[i]; return r; }
OP I loadi(const int32_t* p) { I r; memcpy(r.v, p, sizeof r.v); return r; }
OP F scale2(F p, F t) {
    EACH {
        uint32_t a, b;
        memcpy(&a, &p.v[i], 4), memcpy(&b, &t.v[i], 4);
        a += b << 23;
        memcpy(&p.v[i], &a, 4);
    }
    return p;
}
OP F zero_below(F x, F limit, F y) { EACH y.v[i] = x.v[i] >= limit.v[i] ? y.v[i] : 0.f; return y; }
OP float hsum(F x) { for (int w = 8; w; w /= 2) for (int i = 0; i < w; i++) x.v[i] += x.v[i + w]; return x.v[0]; }
OP float hmax(F x) { float m = x.v[0]; EACH m = x.v[i] > m ? x.v[i] : m; return m; }

OP float widen(half_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023, bits;
    if (exponent == 31) bits = sign | 0x7F800000 | mantissa << 13;
    else if (exponent) bits = sign | (exponent + 112) << 23 | mantissa << 13;
    else {  // a subnormal half is a normal float
        float small = (float)mantissa * 5.9604644775390625e-8f;
        memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
OP half_t narrow(float x) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) return (half_t)(sign | 0x7E00 | (rest >> 13 & 1023));
    if (rest >= 0x477FF000) return (half_t)(sign | 0x7C00);
    if (rest >= 0x38800000) return (half_t)(sign | ((rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13));
    float magnitude;
    memcpy(&magnitude, &rest, 4);
    return (half_t)(sign | (uint32_t)nearbyintf(magnitude * 16777216.f));  // 2^24
}
OP F load_half(const half_t* p) { F r; EACH r.v[i] = widen(p[i]); return r; }
OP void store_half(half_t* p, F x) { EACH p[i] = narrow(x.v[i]); }
OP void scatter_half(half_t* p, F x) { EACH p[(size_t)i * kKeyBlock] = narrow(x.v[i]); }
OP void store_act(uint8_t* p, I q) { EACH p[i] = (uint8_t)(int8_t)q.v[i]; }
OP void pause_() {}
OP void yield_() { std::this_thread::yield(); }
OP L load_lanes(const uint64_t* p) { L r; memcpy(r.v, p, sizeof r.v); return r; }
OP void store_lanes(uint64_t* p, L x) { memcpy(p, x.v, sizeof x.v); }
OP L set1_lanes(uint64_t x) { L r; LANES r.v[i] = x; return r; }
OP L mul_low(L x, L y) { LANES x.v[i] = (uint64_t)(uint32_t)x.v[i] * (uint32_t)y.v[i]; return x; }
OP L high(L x) { LANES x.v[i] >>= 32; return x; }
OP L xor_(L x, L y) { LANES x.v[i] ^= y.v[i]; return x; }
OP void prefetch(const uint8_t*) {}

#include "stream.inc"

static void dot_panel(const uint8_t* panel, const uint8_t* act, int k, int rows, int32_t (*out)[kPanel], Stream) {
    const int8_t* w = (const int8_t*)panel + kHeader;
    for (int r = 0; r < rows; r++) {
        const int8_t* a = (const int8_t*)act + (size_t)r * k;
        int32_t acc[kPanel] = {0};
        for (int i = 0; i < k; i++)
            for (int c = 0; c < kPanel; c++) acc[c] += (int32_t)a[i] * w[(size_t)i * kPanel + c];
        memcpy(out[r], acc, sizeof acc);
    }
}

static void pack(const int8_t* rows, int32_t k, uint8_t* panel) {
    for (int c = 0; c < kPanel; c++)
        for (int i = 0; i < k; i++) panel[kHeader + (size_t)i * kPanel + c] = (uint8_t)rows[(size_t)c * k + i];
}

#include "forward.inc"
#include "noise.inc"

} // namespace

const Isa kPortable{"portable", kActBytes, 1, run, pack, dot_again, noise_words, noise_candidates};

} // namespace entmtp
