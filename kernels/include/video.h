/* SPDX-License-Identifier: Apache-2.0 */
/* What the video operations share in C: words of the parameter buffer (kernels/video.py), the
 * widest float vector, rows of samples as floats and back. */
#ifndef PVR_VIDEO_H
#define PVR_VIDEO_H

#include "pvr.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum pvr_video_param {
    PVR_N_TILES = 0, PVR_WIDTH = 4, PVR_HEIGHT = 5, PVR_BAND_Y = 6, PVR_SRC_Y = 7, PVR_COL0 = 8,
    PVR_C_WIDTH = 9, PVR_C_HEIGHT = 10, PVR_C_BAND_Y = 11, PVR_C_SRC_Y = 12, PVR_C_ROWS = 13,
};

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__) || defined(PVR_RVV)
#define VL 8 /* V: two registers of 128 bits, or a longer one */
#else
#define VL 4
#endif
/* A vector of VL floats that may lie at any float's address. */
typedef float vf __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));

/* What compilers do not make of the generic form: a where it is greater, or smaller, else b; b where
 * one is no number. */
static inline vf pvr_greater(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    const vi up = a > b;
    return (vf)((up & (vi)a) | (~up & (vi)b));
#endif
}
static inline vf pvr_smaller(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
    const vi down = a < b;
    return (vf)((down & (vi)a) | (~down & (vi)b));
#endif
}

/* The whole part of each. PVR_TRUNCATE_LANES: lane by lane, for an emulator that lacks the instruction (tools/cross). */
static inline vi pvr_truncated(vf v) {
#ifdef PVR_TRUNCATE_LANES
    vi whole;
    for (int i = 0; i < VL; i++) whole[i] = (int32_t)v[i];
    return whole;
#else
    return __builtin_convertvector(v, vi);
#endif
}

/* r where it is positive, else slope times it. */
static inline vf pvr_prelu(vf r, float slope) {
#if defined(__AVX512F__)
    const __m512 x = (__m512)r;
    const __mmask16 down = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NGT_UQ);
    return (vf)_mm512_mask_mul_ps(x, down, x, _mm512_set1_ps(slope));
#else
    const vf s = r * slope;
    const vi up = r > 0.0f;
    return (vf)((up & (vi)r) | (~up & (vi)s));
#endif
}

static inline int pvr_clamp(int v, int top) { return v < 0 ? 0 : v > top ? top : v; }

/* A value on the sample scale, rounded half up and held to 0..top; NaN gives 0 as in GLSL. */
static inline int pvr_quantise(float v, float top) {
    v = v > 0.0f ? v : 0.0f;
    v += 0.5f;
    return (int)(v < top ? v : top);
}

/* n floats from column x0 on of a line of samples that ends at `last`: `scale` times each; outside
 * of it the border repeats. */
static inline void pvr_samples(const int bits, const void *line, int last, int x0, int n,
                               float scale, float *y) {
    const int a = pvr_clamp(-x0, n), end = pvr_clamp(last + 1 - x0, n), b = end > a ? end : a;
    const uint8_t *s8 = line;
    const uint16_t *s16 = line;
    const float left = scale * (float)(bits == 8 ? s8[0] : s16[0]);
    const float right = scale * (float)(bits == 8 ? s8[last] : s16[last]);
    if (bits == 8)
        for (int x = a; x < b; x++) y[x] = scale * s8[x0 + x];
    else
        for (int x = a; x < b; x++) y[x] = scale * s16[x0 + x];
    for (int x = 0; x < a; x++) y[x] = left;
    for (int x = b; x < n; x++) y[x] = right;
}

/* Pixels x0..x0+n-1 of a row, each of `scale` phases (lines of `each` floats on the sample scale),
 * as samples of component c of `step` that lie by turns; none from sample `room` on. */
static inline __attribute__((always_inline)) void pvr_scatter_as(
    const int bits, const int scale, const int step, void *line, int c, size_t x0, size_t n,
    const float *phases, size_t each, size_t room) {
    const float top = bits == 8 ? 255.0f : 65535.0f;
    const size_t pixel = (size_t)(scale * step), at = x0 * pixel + (size_t)c;
    uint8_t *d8 = (uint8_t *)line + at;
    uint16_t *d16 = (uint16_t *)line + at;
    size_t whole = n;
    while (whole > 0 && at + whole * pixel - (size_t)step >= room) whole--;
    for (size_t x = 0; x < whole; x++)
        for (int b = 0; b < scale; b++) {
            const int v = pvr_quantise(phases[(size_t)b * each + x], top);
            if (bits == 8) d8[x * pixel + (size_t)(b * step)] = (uint8_t)v;
            else d16[x * pixel + (size_t)(b * step)] = (uint16_t)v;
        }
    /* Of the pixel that the row's end cuts, what there is room for. */
    for (int b = 0; whole < n && b < scale; b++) {
        const size_t i = whole * pixel + (size_t)(b * step);
        if (at + i >= room) break;
        const int v = pvr_quantise(phases[(size_t)b * each + whole], top);
        if (bits == 8) d8[i] = (uint8_t)v;
        else d16[i] = (uint16_t)v;
    }
}

/* The same for the usual case, scale 2 and step 1, as many whole vectors as fit: both phases of a pixel
 * are one word. How many pixels that are. */
static inline size_t pvr_scatter_pairs(int bits, void *line, size_t x0, size_t n,
                                       const float *phases, size_t each, size_t room) {
    typedef uint16_t halves __attribute__((vector_size(VL * 2), aligned(2), may_alias));
    const vf top = (vf){0} + (bits == 8 ? 255.0f : 65535.0f);
    size_t x = 0;
    for (; x + VL <= n && 2 * (x0 + x + VL) <= room; x += VL) {
        vi q[2];
        for (size_t b = 0; b < 2; b++) {
            const vf v = pvr_greater(*(const vf *)(phases + b * each + x), (vf){0}) + 0.5f;
            q[b] = pvr_truncated(pvr_smaller(v, top));
        }
        void *to = (uint8_t *)line + 2 * (x0 + x) * (bits == 8 ? 1 : 2);
        if (bits == 8) *(halves *)to = __builtin_convertvector(q[0] | q[1] << 8, halves);
        else *(vi *)to = q[0] | q[1] << 16;
    }
    return x;
}

#define PVR_SCATTER(SCALE, STEP)                                                               \
    if (scale == SCALE && step == STEP) {                                                      \
        if (bits == 8) pvr_scatter_as(8, SCALE, STEP, line, c, x0, n, phases, each, room);     \
        else pvr_scatter_as(16, SCALE, STEP, line, c, x0, n, phases, each, room);              \
    }
static inline void pvr_scatter(int bits, int scale, int step, void *line, int c, size_t x0,
                               size_t n, const float *phases, size_t each, size_t room) {
    if (scale == 2 && step == 1) {
        const size_t done = pvr_scatter_pairs(bits, line, x0, n, phases, each, room);
        x0 += done, n -= done, phases += done;
        if (!n) return;
    }
    PVR_SCATTER(2, 1)
    PVR_SCATTER(2, 2)
    PVR_SCATTER(3, 1)
    PVR_SCATTER(3, 2)
    PVR_SCATTER(4, 1)
    PVR_SCATTER(4, 2)
}
#undef PVR_SCATTER

enum { PVR_CHUNK = 64 }; /* core pixels at a time: their phases stay in the first cache */

/* What samples come from: the filtered values around a pixel and the network's maps. */
typedef struct {
    const float *base; /* [maps][25] */
    const float *x[5]; /* rows of values; a pixel's window begins at its own column */
    const float *maps; /* [maps][xs] */
    size_t xs, across; /* maps of a row of samples: scale, or more, unused ones behind them */
} pvr_pixels;

/* The phases of NV vectors of pixels in ROWS rows of samples: sums enough to keep the multipliers
 * busy. out: [ROWS][SCALE][PVR_CHUNK]. */
#define PVR_PHASES(SCALE, ROWS, NV)                                                             \
    static void phases_##SCALE##_##NV(const pvr_pixels *g, int a, size_t x, size_t at,          \
                                      float top, float *out) {                                  \
        const size_t first = g->across * (size_t)a;                                             \
        vf acc[ROWS][SCALE][NV] = {{{{0}}}};                                                    \
        for (int t = 0; t < 25; t++) {                                                          \
            const float *s = g->x[t / 5] + t % 5 + x + at;                                      \
            vf v[NV];                                                                           \
            for (int i = 0; i < NV; i++) v[i] = *(const vf *)(s + i * VL);                      \
            for (size_t r = 0; r < ROWS; r++)                                                   \
                for (size_t q = 0; q < SCALE; q++)                                              \
                    for (int i = 0; i < NV; i++)                                                \
                        acc[r][q][i] += v[i] * g->base[25 * (first + r * SCALE + q) + (size_t)t]; \
        }                                                                                       \
        for (size_t r = 0; r < ROWS; r++)                                                       \
            for (size_t q = 0; q < SCALE; q++)                                                  \
                for (size_t i = 0; i < NV; i++) {                                               \
                    const float *m = g->maps + (first + r * SCALE + q) * g->xs + x + at + i * VL; \
                    *(vf *)(out + (r * SCALE + q) * PVR_CHUNK + at + i * VL) =                  \
                        (acc[r][q][i] + *(const vf *)m) * top;                                  \
                }                                                                               \
    }
PVR_PHASES(2, 2, 1)
PVR_PHASES(2, 2, 2)
PVR_PHASES(3, 1, 1)
PVR_PHASES(3, 1, 2)
PVR_PHASES(4, 1, 1)
PVR_PHASES(4, 1, 2)
#undef PVR_PHASES

/* Of n pixels from x on, those of one row of samples, or of both where scale is 2. */
static inline void pvr_phases(const pvr_pixels *g, int scale, int a, size_t x, size_t n, float top,
                              float *out) {
    for (size_t at = 0; at < n;) {
        const int two = at + VL < n;
        if (scale == 2) (two ? phases_2_2 : phases_2_1)(g, a, x, at, top, out);
        else if (scale == 3) (two ? phases_3_2 : phases_3_1)(g, a, x, at, top, out);
        else (two ? phases_4_2 : phases_4_1)(g, a, x, at, top, out);
        at += two ? 2 * VL : VL;
    }
}

/* The `scale` rows of samples of a row of `cols` pixels, the first at column `left` of lines that
 * are `stride` words apart; component c of `step` that lie by turns. */
static inline void pvr_enlarge(const pvr_pixels *g, int bits, int scale, int step, int c,
                               uint32_t *dst, size_t stride, size_t left, size_t cols) {
    const float top = bits == 8 ? 255.0f : 65535.0f;
    const size_t room = stride * (bits == 8 ? 4 : 2);
    const int together = scale == 2 ? 2 : 1;
    for (int a = 0; a < scale; a += together)
        for (size_t x0 = 0; x0 < cols; x0 += PVR_CHUNK) {
            float out[4 * PVR_CHUNK];
            const size_t n = cols - x0 < PVR_CHUNK ? cols - x0 : PVR_CHUNK;
            pvr_phases(g, scale, a, x0, n, top, out);
            for (int r = 0; r < together; r++)
                pvr_scatter(bits, scale, step, dst + (size_t)(a + r) * stride, c, left + x0, n,
                            out + r * scale * PVR_CHUNK, PVR_CHUNK, room);
        }
}

#endif
