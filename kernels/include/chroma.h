/* SPDX-License-Identifier: Apache-2.0 */
/* What a chroma network sees: a row of chroma samples and the four of luma around each. */
#ifndef PVR_CHROMA_H
#define PVR_CHROMA_H

#include "video.h"

typedef struct {
    int bits, step, component;
    size_t stride, luma_stride;  /* words */
    const uint32_t *src, *luma;
    float scale;
} pvr_chroma;

/* A line of xs samples: those at first + each * x for x in a..b-1, `left` before and `right` behind
 * them (places in the line, too), times scale. */
static inline __attribute__((always_inline)) void line_as(const int bits, float *y,
                                                          const void *line, int first, int each,
                                                          int a, int b, int xs, int left,
                                                          int right, float scale) {
    const uint8_t *s8 = line;
    const uint16_t *s16 = line;
    const float before = scale * (bits == 8 ? s8[left] : s16[left]);
    const float behind = scale * (bits == 8 ? s8[right] : s16[right]);
    for (int x = 0; x < a; x++) y[x] = before;
    for (int x = a; x < b; x++) y[x] = scale * (bits == 8 ? s8[first + each * x] : s16[first + each * x]);
    for (int x = b; x < xs; x++) y[x] = behind;
}

/* Five channels, `pitch` floats apart, of row m of chroma, columns x0 .. x0 + xs - 1. */
static inline void pvr_chroma_row(const pvr_chroma *g, const uint32_t *p, int m, int x0, int xs,
                                  size_t pitch, float *y) {
    const int width = (int)p[PVR_C_WIDTH], last_x = (int)p[PVR_WIDTH] - 1, step = g->step;
    const int a = pvr_clamp(-x0, xs);
    m = pvr_clamp(m, (int)p[PVR_C_HEIGHT] - 1);
    for (int c = 0; c < 5; c++, y += pitch) {
        const int a_half = (c - 1) / 2, b_half = (c - 1) % 2;
        const uint32_t *line = g->src;
        int first = x0 * step + g->component, each = step, count = width;
        int left = g->component, right = (width - 1) * step + g->component;
        if (c == 0) {
            line += (size_t)(m - (int)p[PVR_C_SRC_Y]) * g->stride;
        } else {
            const int fy = pvr_clamp(2 * m + a_half, (int)p[PVR_HEIGHT] - 1);
            line = g->luma + (size_t)(fy - (int)p[PVR_SRC_Y]) * g->luma_stride;
            first = 2 * x0 + b_half, each = 2;
            count = (last_x + 2 - b_half) / 2;
            left = b_half < last_x ? b_half : last_x;
            right = pvr_clamp(2 * (width - 1) + b_half, last_x);
        }
        const int b = pvr_clamp(count - x0, xs), to = b < a ? a : b;
        if (g->bits == 8 && each == 1) line_as(8, y, line, first, 1, a, to, xs, left, right, g->scale);
        else if (g->bits == 8) line_as(8, y, line, first, 2, a, to, xs, left, right, g->scale);
        else line_as(16, y, line, first, each, a, to, xs, left, right, g->scale);
    }
}

#endif
