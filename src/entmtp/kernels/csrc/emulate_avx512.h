// AVX-512 in plain C++ by SIMDe, so that isa_avx512.cpp can be tested on a CPU without it. Only
// included where ENTMTP_EMULATE_AVX512 is defined; what SIMDe lacks is added here.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <immintrin.h>
#include <cstdint>

namespace entmtp_emulation {

inline __m256 half_of(simde__m512 v, int i) {
    simde__m512_private p = simde__m512_to_private(v);
    __m256 r;
    __builtin_memcpy(&r, reinterpret_cast<const char*>(&p) + 32 * i, 32);
    return r;
}
inline simde__m512i cvtps_epi32(simde__m512 v) {
    simde__m512i_private p;
    for (int i = 0; i < 2; i++) {
        __m256i r = _mm256_cvtps_epi32(half_of(v, i));
        __builtin_memcpy(reinterpret_cast<char*>(&p) + 32 * i, &r, 32);
    }
    return simde__m512i_from_private(p);
}
inline simde__m512 cvtepi32_ps(simde__m512i v) {
    simde__m512i_private from = simde__m512i_to_private(v);
    simde__m512_private to;
    for (int i = 0; i < 16; i++) to.f32[i] = static_cast<float>(from.i32[i]);
    return simde__m512_from_private(to);
}
inline simde__m512 cvtph_ps(__m256i h) {
    simde__m512_private p;
    __m128i parts[2];
    __builtin_memcpy(parts, &h, 32);
    for (int i = 0; i < 2; i++) {
        __m256 r = _mm256_cvtph_ps(parts[i]);
        __builtin_memcpy(reinterpret_cast<char*>(&p) + 32 * i, &r, 32);
    }
    return simde__m512_from_private(p);
}
inline __m256i cvtps_ph(simde__m512 v) {
    __m128i parts[2] = {_mm256_cvtps_ph(half_of(v, 0), 0), _mm256_cvtps_ph(half_of(v, 1), 0)};
    __m256i r;
    __builtin_memcpy(&r, parts, 32);
    return r;
}
inline __m128i cvtepi32_epi8(simde__m512i v) {
    simde__m512i_private p = simde__m512i_to_private(v);
    alignas(16) uint8_t r[16];
    for (int i = 0; i < 16; i++) r[i] = static_cast<uint8_t>(p.i32[i]);
    return _mm_load_si128(reinterpret_cast<const __m128i*>(r));
}

} // namespace entmtp_emulation

#undef _mm512_cvtps_epi32
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtps_epi32(v) entmtp_emulation::cvtps_epi32(v)
#define _mm512_cvtepi32_ps(v) entmtp_emulation::cvtepi32_ps(v)
#define _mm512_cvtph_ps(h) entmtp_emulation::cvtph_ps(h)
#define _mm512_cvtps_ph(v, mode) entmtp_emulation::cvtps_ph(v)
#define _mm512_cvtepi32_epi8(v) entmtp_emulation::cvtepi32_epi8(v)
