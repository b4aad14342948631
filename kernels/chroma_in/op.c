/* SPDX-License-Identifier: Apache-2.0 */
#include "video.h"

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

PVR_OP(chroma_in) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const int bits = (int)k[0], step = (int)k[1], component = (int)k[2];
    const uint32_t stride = k[3], luma_stride = k[4], tw = k[5], rows = k[6] + 2 * k[7];
    const uint32_t y_tile = k[9];
    const int halo = (int)k[7], xs = (int)k[8];
    const float scale = pvr_push_f32(call, 10);
    const int width = (int)p[PVR_C_WIDTH], last_x = (int)p[PVR_WIDTH] - 1;
    size_t begin, end;
    pvr_split(team, (size_t)p[PVR_N_TILES] * rows, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const uint32_t tile = (uint32_t)(i / rows), row = (uint32_t)(i % rows);
        const int m = pvr_clamp((int)(p[PVR_C_BAND_Y] + row) - halo, (int)p[PVR_C_HEIGHT] - 1);
        float *y = (float *)call->buf[3] + (size_t)tile * y_tile + (size_t)row * 5 * (size_t)xs;
        const int x0 = (int)((p[PVR_COL0] + tile) * tw) - halo, a = pvr_clamp(-x0, xs);
        for (int c = 0; c < 5; c++, y += xs) {
            const int a_half = (c - 1) / 2, b_half = (c - 1) % 2;
            const uint32_t *line = call->buf[1];
            int first = x0 * step + component, each = step, count = width;
            int left = component, right = (width - 1) * step + component;
            if (c == 0) {
                line += (size_t)(m - (int)p[PVR_C_SRC_Y]) * stride;
            } else {
                const int fy = pvr_clamp(2 * m + a_half, (int)p[PVR_HEIGHT] - 1);
                line = (const uint32_t *)call->buf[2] + (size_t)(fy - (int)p[PVR_SRC_Y]) * luma_stride;
                first = 2 * x0 + b_half, each = 2;
                count = (last_x + 2 - b_half) / 2;
                left = b_half < last_x ? b_half : last_x;
                right = pvr_clamp(2 * (width - 1) + b_half, last_x);
            }
            const int b = pvr_clamp(count - x0, xs), to = b < a ? a : b;
            if (bits == 8) line_as(8, y, line, first, each, a, to, xs, left, right, scale);
            else line_as(16, y, line, first, each, a, to, xs, left, right, scale);
        }
    }
}
