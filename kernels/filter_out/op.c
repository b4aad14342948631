/* SPDX-License-Identifier: Apache-2.0 */
#include "video.h"

enum { CHUNK = 256, ROOM = CHUNK + 4 + VL };

typedef struct {
    int bits, step, width;
} plane;

static inline float load(const plane *g, const void *line, int at) {
    return g->bits == 8 ? ((const uint8_t *)line)[at] : ((const uint16_t *)line)[at];
}

/* Pixels x0-2 .. x0+n+1 of component c of a line as floats, the border repeated. */
static void gather(const plane *g, float *out, const void *line, int c, int x0, int n) {
    const int x = x0 - 2, count = n + 4, step = g->step;
    /* Pixels a..b-1 lie inside of the plane. */
    const int a = x < 0 ? -x : 0, b = x + count > g->width ? g->width - x : count;
    if (g->bits == 8 && step == 1) {
        const uint8_t *s = (const uint8_t *)line + x;
        for (int i = a; i < b; i++) out[i] = s[i];
    } else if (g->bits == 8) {
        const uint8_t *s = (const uint8_t *)line + 2 * x + c;
        for (int i = a; i < b; i++) out[i] = s[2 * i];
    } else {
        const uint16_t *s = (const uint16_t *)line + step * x + c;
        for (int i = a; i < b; i++) out[i] = s[step * i];
    }
    const float left = load(g, line, c), right = load(g, line, (g->width - 1) * step + c);
    for (int i = 0; i < a; i++) out[i] = left;
    for (int i = b; i < count; i++) out[i] = right;
    for (int i = count; i < ROOM; i++) out[i] = 0.0f;
}

PVR_OP(filter_out) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const plane g = {(int)k[0], (int)k[1], (int)p[PVR_C_WIDTH]};
    const int scale = (int)k[2];
    const size_t stride = k[3], out_stride = k[4];
    const size_t room = out_stride * (g.bits == 8 ? 4 : 2);
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
        uint32_t *dst = (uint32_t *)call->buf[3] + (size_t)scale * row * out_stride;
        for (int x0 = 0; x0 < g.width; x0 += CHUNK) {
            const int n = g.width - x0 < CHUNK ? g.width - x0 : CHUNK;
            for (int c = 0; c < g.step; c++) {
                float in[5][ROOM], out[4][CHUNK];
                for (int t = 0; t < 5; t++) gather(&g, in[t], lines[t], c, x0, n);
                for (int a = 0; a < scale; a++) {
                    const float *f = filters + 25 * scale * a;
                    for (int x = 0; x < n; x += VL) {
                        vf acc[4] = {{0}};
                        for (int t = 0; t < 25; t++) {
                            const vf s = *(const vf *)(in[t / 5] + x + t % 5);
                            for (int q = 0; q < scale; q++) acc[q] += s * f[25 * q + t];
                        }
                        for (int q = 0; q < scale; q++) *(vf *)(out[q] + x) = acc[q];
                    }
                    pvr_scatter(g.bits, scale, g.step, dst + (size_t)a * out_stride, c,
                                (size_t)x0, (size_t)n, out[0], CHUNK, room);
                }
            }
        }
    }
}
