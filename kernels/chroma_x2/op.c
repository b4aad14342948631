/* SPDX-License-Identifier: Apache-2.0 */
#include "video.h"

enum { CHUNK = 256, ROOM = CHUNK + 4 + VL };

typedef struct {
    int bits, step, width;
    float top;
} plane;

/* Pixels x0-2 .. x0+n+1 of component c of a line as floats, the border repeated. */
static void gather(const plane *g, float *out, const void *line, int c, int x0, int n) {
    for (int i = 0; i < n + 4; i++) {
        const int at = pvr_clamp(x0 + i - 2, g->width - 1) * g->step + c;
        out[i] = g->bits == 8 ? ((const uint8_t *)line)[at] : ((const uint16_t *)line)[at];
    }
    for (int i = n + 4; i < ROOM; i++) out[i] = 0.0f;
}

/* One phase of n pixels from x0 on to an output line that has room for so many samples. */
static void scatter(const plane *g, void *line, const float *in, int c, int x0, int n, int phase,
                    size_t room) {
    for (int x = 0; x < n; x++) {
        const size_t at = (size_t)((2 * (x0 + x) + phase) * g->step + c);
        if (at >= room) return;
        const int q = pvr_quantise(in[x], g->top);
        if (g->bits == 8) ((uint8_t *)line)[at] = (uint8_t)q;
        else ((uint16_t *)line)[at] = (uint16_t)q;
    }
}

PVR_OP(chroma_x2) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const plane g = {(int)k[0], (int)k[1], (int)p[PVR_C_WIDTH], k[0] == 8 ? 255.0f : 65535.0f};
    const size_t stride = k[2], out_stride = k[3], room = out_stride * (g.bits == 8 ? 4 : 2);
    const int last_y = (int)p[PVR_C_HEIGHT] - 1;
    const float *filters = call->buf[2];
    size_t begin, end;
    pvr_split(team, p[PVR_C_ROWS], &begin, &end);
    for (size_t row = begin; row < end; row++) {
        const uint32_t *lines[5];
        for (int t = 0; t < 5; t++) {
            const int fy = pvr_clamp((int)(p[PVR_C_BAND_Y] + row) + t - 2, last_y);
            const size_t src_row = (size_t)(fy - (int)p[PVR_C_SRC_Y]);
            lines[t] = (const uint32_t *)call->buf[1] + src_row * stride;
        }
        uint32_t *dst = (uint32_t *)call->buf[3] + 2 * row * out_stride;
        for (int x0 = 0; x0 < g.width; x0 += CHUNK) {
            const int n = g.width - x0 < CHUNK ? g.width - x0 : CHUNK;
            for (int c = 0; c < g.step; c++) {
                float in[5][ROOM], out[4][CHUNK];
                for (int t = 0; t < 5; t++) gather(&g, in[t], lines[t], c, x0, n);
                for (int x = 0; x < n; x += VL) {
                    vf acc[4] = {{0}};
                    for (int t = 0; t < 25; t++) {
                        const vf s = *(const vf *)(in[t / 5] + x + t % 5);
                        for (int q = 0; q < 4; q++) acc[q] += s * filters[25 * q + t];
                    }
                    for (int q = 0; q < 4; q++) *(vf *)(out[q] + x) = acc[q];
                }
                for (int q = 0; q < 4; q++)
                    scatter(&g, dst + (q / 2) * out_stride, out[q], c, x0, n, q % 2, room);
            }
        }
    }
}
