/* SPDX-License-Identifier: Apache-2.0 */
/* What the video operations share in C: words of the parameter buffer (kernels/video.py), the
 * widest float vector, samples into rows. */
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

#endif
