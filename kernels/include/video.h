/* SPDX-License-Identifier: Apache-2.0 */
/* What the video operations share in C: words of the parameter buffer (kernels/video.py), the
 * widest float vector, rows of samples as floats and back. */
#ifndef PVR_VIDEO_H
#define PVR_VIDEO_H

#include "pvr.h"

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

#define PVR_SCATTER(SCALE, STEP)                                                               \
    if (scale == SCALE && step == STEP) {                                                      \
        if (bits == 8) pvr_scatter_as(8, SCALE, STEP, line, c, x0, n, phases, each, room);     \
        else pvr_scatter_as(16, SCALE, STEP, line, c, x0, n, phases, each, room);              \
    }
static inline void pvr_scatter(int bits, int scale, int step, void *line, int c, size_t x0,
                               size_t n, const float *phases, size_t each, size_t room) {
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

#define PVR_PHASES(SCALE)                                                                       \
    static void phases_##SCALE(const pvr_pixels *g, int a, size_t x0, size_t n, float top,      \
                               float *out) {                                                    \
        for (size_t x = 0; x < n; x += VL) {                                                    \
            vf acc[SCALE] = {{0}};                                                              \
            for (int t = 0; t < 25; t++) {                                                      \
                const vf v = *(const vf *)(g->x[t / 5] + t % 5 + x0 + x);                       \
                for (int q = 0; q < SCALE; q++)                                                 \
                    acc[q] += v * g->base[25 * (g->across * (size_t)a + (size_t)q) + (size_t)t]; \
            }                                                                                   \
            for (int q = 0; q < SCALE; q++) {                                                   \
                const float *m = g->maps + (g->across * (size_t)a + (size_t)q) * g->xs + x0 + x; \
                *(vf *)(out + q * PVR_CHUNK + x) = (acc[q] + *(const vf *)m) * top;             \
            }                                                                                   \
        }                                                                                       \
    }
PVR_PHASES(2)
PVR_PHASES(3)
PVR_PHASES(4)
#undef PVR_PHASES

/* The `scale` rows of samples of a row of `cols` pixels, the first at column `left` of lines that
 * are `stride` words apart; component c of `step` that lie by turns. */
static inline void pvr_enlarge(const pvr_pixels *g, int bits, int scale, int step, int c,
                               uint32_t *dst, size_t stride, size_t left, size_t cols) {
    const float top = bits == 8 ? 255.0f : 65535.0f;
    const size_t room = stride * (bits == 8 ? 4 : 2);
    for (int a = 0; a < scale; a++, dst += stride)
        for (size_t x0 = 0; x0 < cols; x0 += PVR_CHUNK) {
            float out[4 * PVR_CHUNK];
            const size_t n = cols - x0 < PVR_CHUNK ? cols - x0 : PVR_CHUNK;
            if (scale == 2) phases_2(g, a, x0, n, top, out);
            else if (scale == 3) phases_3(g, a, x0, n, top, out);
            else phases_4(g, a, x0, n, top, out);
            pvr_scatter(bits, scale, step, dst, c, left + x0, n, out, PVR_CHUNK, room);
        }
}

#endif
