/* SPDX-License-Identifier: Apache-2.0 */
/* Sixteen lanes of float32 and int32 on every instruction set: one row of a weight tile a lane.
 *
 * AVX-512 holds them in one register, AVX2 in two, NEON in four; elsewhere they are GCC vectors of
 * 4, which SSE2 has and other targets lower to scalars. RISC-V's V takes all 16 in one GCC vector: a
 * group of four registers of 128 bits, which every longer register has room for, too. Loads and
 * stores need no alignment.
 */
#ifndef PVR_LANES_H
#define PVR_LANES_H

#include <stdint.h>
#include <string.h>

#include "pvr.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define PVR_AVX512 1
#endif

#define PVR_INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };

static inline float pvr_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint32_t pvr_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

/* A float rounded to the nearest half, ties to even. */
static inline uint16_t pvr_to_half(float f) {
#if defined(__F16C__)
    return (uint16_t)_cvtss_sh(f, 0);
#elif defined(__aarch64__)
    __fp16 h = (__fp16)f;
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
#else
    uint32_t u = pvr_bits(f), sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u >= 0x47800000u) /* too large, infinite, or no number */
        return (uint16_t)(sign | (u > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (u < 0x38800000u) /* subnormal: adding 0.5 leaves the half in the lowest bits, rounded */
        return (uint16_t)(sign | (pvr_bits(pvr_float(u) + 0.5f) - 0x3f000000u));
    u += 0xc8000fffu + ((u >> 13) & 1u);
    return (uint16_t)(sign | (u >> 13));
#endif
}

#if defined(PVR_AVX512)

typedef __m512 vf;
typedef __m512i vi;

PVR_INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
PVR_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
PVR_INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
PVR_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
PVR_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
PVR_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
PVR_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
PVR_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
PVR_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
PVR_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
PVR_INLINE float vf_sum(vf a) { return _mm512_reduce_add_ps(a); }
PVR_INLINE float vf_most(vf a) { return _mm512_reduce_max_ps(a); }
PVR_INLINE vf lanes_power_(vf a) { /* see vf_exp */
    __m512i bits = _mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}
PVR_INLINE vf vf_of_int(vi a) { return _mm512_cvtepi32_ps(a); }
/* Sixteen halves, or int8. */
PVR_INLINE vf vf_half(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
PVR_INLINE vf vf_bytes(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* The low and the high halves of sixteen words. */
PVR_INLINE void vf_half2(const uint32_t *p, vf *low, vf *high) {
    __m512i w = _mm512_loadu_si512(p);
    *low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w));
    *high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(w, 16)));
}

#elif defined(__AVX2__)

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;

PVR_INLINE vf vf_set1(float x) { return (vf){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PVR_INLINE vf vf_load(const float *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PVR_INLINE void vf_store(float *p, vf x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
PVR_INLINE vf vf_add(vf x, vf y) { return (vf){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
PVR_INLINE vf vf_mul(vf x, vf y) { return (vf){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
PVR_INLINE vf vf_fma(vf x, vf y, vf z) {
    return (vf){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
PVR_INLINE vf vf_sub(vf x, vf y) { return (vf){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
PVR_INLINE vf vf_div(vf x, vf y) { return (vf){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
PVR_INLINE vf vf_max(vf x, vf y) { return (vf){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
PVR_INLINE vf vf_min(vf x, vf y) { return (vf){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
PVR_INLINE float vf_most(vf x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}
PVR_INLINE __m256 lanes_power1_(__m256 a) {
    __m256i bits = _mm256_add_epi32(_mm256_castps_si256(a), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
PVR_INLINE vf lanes_power_(vf x) { return (vf){lanes_power1_(x.a), lanes_power1_(x.b)}; }
PVR_INLINE float vf_sum(vf x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
PVR_INLINE vf vf_of_int(vi x) { return (vf){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
PVR_INLINE vf vf_half(const uint16_t *p) {
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
PVR_INLINE vf vf_bytes(const int8_t *p) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return (vf){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
PVR_INLINE __m256 lanes_halves_(__m256i w) { /* of eight words below 2^16 */
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(w, w), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
PVR_INLINE void vf_half2(const uint32_t *p, vf *low, vf *high) {
    __m256i a = _mm256_loadu_si256((const __m256i *)p),
            b = _mm256_loadu_si256((const __m256i *)(p + 8));
    __m256i mask = _mm256_set1_epi32(0xffff);
    *low = (vf){lanes_halves_(_mm256_and_si256(a, mask)), lanes_halves_(_mm256_and_si256(b, mask))};
    *high = (vf){lanes_halves_(_mm256_srli_epi32(a, 16)), lanes_halves_(_mm256_srli_epi32(b, 16))};
}

#else

#if defined(PVR_RVV)
enum { GROUP = 16 }; /* lanes of a GCC vector */
#else
enum { GROUP = 4 };
#endif
typedef float f_group __attribute__((vector_size(GROUP * 4)));
typedef int32_t i_group __attribute__((vector_size(GROUP * 4)));
typedef uint32_t u_group __attribute__((vector_size(GROUP * 4)));
typedef uint16_t h_group __attribute__((vector_size(GROUP * 2)));
typedef struct { f_group v[LANES / GROUP]; } vf;
typedef struct { i_group v[LANES / GROUP]; } vi;

#define LANES_EACH_ _Pragma("GCC unroll 4") for (int i_ = 0; i_ < LANES / GROUP; i_++)

PVR_INLINE vf vf_set1(float x) {
    vf r;
    LANES_EACH_ r.v[i_] = x - (f_group){0}; /* keeps the sign of -0 */
    return r;
}
PVR_INLINE vf vf_load(const float *p) {
    vf r;
    memcpy(&r, p, sizeof r);
    return r;
}
PVR_INLINE void vf_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
PVR_INLINE vf vf_add(vf a, vf b) {
    LANES_EACH_ a.v[i_] += b.v[i_];
    return a;
}
PVR_INLINE vf vf_mul(vf a, vf b) {
    LANES_EACH_ a.v[i_] *= b.v[i_];
    return a;
}
PVR_INLINE vf vf_fma(vf a, vf b, vf c) {
    LANES_EACH_ c.v[i_] += a.v[i_] * b.v[i_];
    return c;
}
PVR_INLINE vf vf_sub(vf a, vf b) {
    LANES_EACH_ a.v[i_] -= b.v[i_];
    return a;
}
PVR_INLINE vf vf_div(vf a, vf b) {
    LANES_EACH_ a.v[i_] /= b.v[i_];
    return a;
}
PVR_INLINE f_group lanes_max_(f_group a, f_group b) {
#if defined(__aarch64__)
    return (f_group)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#elif defined(__SSE2__)
    return (f_group)_mm_max_ps((__m128)a, (__m128)b);
#else
    u_group greater = (u_group)(a > b);
    return (f_group)((greater & (u_group)a) | (~greater & (u_group)b));
#endif
}
PVR_INLINE vf vf_max(vf a, vf b) {
    LANES_EACH_ a.v[i_] = lanes_max_(a.v[i_], b.v[i_]);
    return a;
}
PVR_INLINE vf vf_min(vf a, vf b) {
    LANES_EACH_ a.v[i_] = -lanes_max_(-a.v[i_], -b.v[i_]);
    return a;
}
PVR_INLINE float vf_most(vf a) {
    f_group s = a.v[0];
    LANES_EACH_ s = lanes_max_(s, a.v[i_]);
    float most = s[0];
    for (int i = 1; i < GROUP; i++)
        most = s[i] > most ? s[i] : most;
    return most;
}
PVR_INLINE vf lanes_power_(vf a) {
    LANES_EACH_ a.v[i_] = (f_group)(((u_group)a.v[i_] + 127) << 23);
    return a;
}
PVR_INLINE float vf_sum(vf a) {
    typedef float quad __attribute__((vector_size(16)));
    quad part[4];
    memcpy(part, &a, sizeof part);
    quad s = (part[0] + part[1]) + (part[2] + part[3]);
    return (s[0] + s[1]) + (s[2] + s[3]);
}
PVR_INLINE vf vf_of_int(vi a) {
    vf r;
    LANES_EACH_ r.v[i_] = __builtin_convertvector(a.v[i_], f_group);
    return r;
}
/* A group of halves, each in the low 16 bits of a lane. */
PVR_INLINE f_group lanes_halves_(u_group h) {
#if defined(__aarch64__)
    return (f_group)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)h)));
#else
    u_group magnitude = (h & 0x7fffu) << 13;
    u_group special = (u_group)((i_group)magnitude >= 0x0f800000) & 0x7f800000u; /* infinite or no number */
    f_group scaled = (f_group)magnitude * 0x1p112f; /* subnormal halves come out right, too */
    return (f_group)((u_group)scaled | special | (h & 0x8000u) << 16);
#endif
}
PVR_INLINE vf vf_half(const uint16_t *p) {
    vf r;
    LANES_EACH_ {
        h_group h;
        memcpy(&h, p + GROUP * i_, sizeof h);
        r.v[i_] = lanes_halves_(__builtin_convertvector(h, u_group));
    }
    return r;
}
PVR_INLINE vf vf_bytes(const int8_t *p) {
    float numbers[LANES];
    for (int i = 0; i < LANES; i++)
        numbers[i] = p[i];
    return vf_load(numbers);
}
PVR_INLINE void vf_half2(const uint32_t *p, vf *low, vf *high) {
    LANES_EACH_ {
        u_group w;
        memcpy(&w, p + GROUP * i_, sizeof w);
        low->v[i_] = lanes_halves_(w & 0xffffu);
        high->v[i_] = lanes_halves_(w >> 16);
    }
}

#endif

/* exp(x), to 2 units in the last place; exp(-87.3) below and exp(88) above that range. (Range
 * reduction and polynomial as in Cephes' expf.) */
PVR_INLINE vf vf_exp(vf x) {
    x = vf_min(vf_max(x, vf_set1(-87.3f)), vf_set1(88.0f));
    const vf magic = vf_set1(
        12582912.0f); /* 1.5 * 2^23: added to it, a number leaves its integer in the low bits */
    vf shifted = vf_fma(x, vf_set1(1.44269504f), magic);
    vf n = vf_sub(shifted, magic);
    vf r = vf_fma(n, vf_set1(2.12194440e-4f), vf_fma(n, vf_set1(-0.693359375f), x));
    vf p = vf_fma(vf_set1(1.9875691500e-4f), r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_fma(p, vf_mul(r, r), vf_add(r, vf_set1(1.0f)));
    return vf_mul(p, lanes_power_(shifted));
}

/* n <= 16 floats or halves, the rest of the lanes 0. */
PVR_INLINE vf vf_load_n(const float *p, size_t n) {
    if (n >= LANES)
        return vf_load(p);
    float some[LANES] = {0};
    memcpy(some, p, n * sizeof *p);
    return vf_load(some);
}
PVR_INLINE vf vf_half_n(const uint16_t *p, size_t n) {
    if (n >= LANES)
        return vf_half(p);
    uint16_t some[LANES] = {0};
    memcpy(some, p, n * sizeof *p);
    return vf_half(some);
}
/* n <= 16 int8, the same. */
PVR_INLINE vf vf_bytes_n(const int8_t *p, size_t n) {
    if (n >= LANES)
        return vf_bytes(p);
    int8_t some[LANES] = {0};
    memcpy(some, p, n);
    return vf_bytes(some);
}
PVR_INLINE void vf_store_n(float *p, vf a, size_t n) {
    if (n >= LANES) {
        vf_store(p, a);
        return;
    }
    float some[LANES];
    vf_store(some, a);
    memcpy(p, some, n * sizeof *p);
}

#endif
