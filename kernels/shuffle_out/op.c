/* SPDX-License-Identifier: Apache-2.0 */
#include "video.h"

enum { CHUNK = 64 }; /* core pixels at a time: an output row's phases stay in the first cache */

typedef struct {
    const float *base, *x, *maps;
    size_t x_row, xs;
    float top;
} window;

/* The phases of one output row for n core pixels from x0 on. */
#define PHASES(SCALE)                                                                          \
    static void phases_##SCALE(const window *g, int a, size_t x0, size_t n, float *out) {      \
        for (size_t x = 0; x < n; x += VL) {                                                   \
            vf acc[SCALE] = {{0}};                                                             \
            for (int t = 0; t < 25; t++) {                                                     \
                const float *s = g->x + (size_t)(t / 5) * g->x_row + t % 5 + x0 + x;           \
                const vf v = *(const vf *)s;                                                   \
                for (int q = 0; q < SCALE; q++) acc[q] += v * g->base[25 * (SCALE * a + q) + t]; \
            }                                                                                  \
            for (int q = 0; q < SCALE; q++) {                                                  \
                const float *m = g->maps + (size_t)(SCALE * a + q) * g->xs + x0 + x;           \
                *(vf *)(out + q * CHUNK + x) = (acc[q] + *(const vf *)m) * g->top;             \
            }                                                                                  \
        }                                                                                      \
    }

PHASES(2)
PHASES(3)
PHASES(4)

PVR_OP(shuffle_out) {
    const uint32_t *k = call->push;
    const int bits = (int)k[0], scale = (int)k[1], step = (int)k[2], component = (int)k[3];
    const uint32_t *p = call->buf[0], *frame = p + k[4];
    const uint32_t width = frame[0], height = frame[1], band_y = frame[2];
    const uint32_t tw = k[6], th = k[7], halo = k[8];
    const size_t stride = k[5], xs = k[9], x_row = k[10], f_tile = k[11], x_tile = k[12];
    const size_t channels = ((size_t)(scale * scale) + 3) / 4 * 4;
    const size_t room = stride * (bits == 8 ? 4 : 2);
    const uint32_t rows = height - band_y < th ? height - band_y : th;
    size_t begin, end;
    pvr_split(team, (size_t)p[PVR_N_TILES] * rows, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t tile = i / rows, row = i % rows;
        const uint32_t left = (p[PVR_COL0] + (uint32_t)tile) * tw;
        if (left >= width) continue;
        const uint32_t cols = width - left < tw ? width - left : tw;
        const float *x = (const float *)call->buf[2] + tile * x_tile;
        const window g = {
            call->buf[3], x + (row + halo - 2) * x_row + halo - 2,
            (const float *)call->buf[1] + tile * f_tile + row * channels * xs,
            x_row, xs, bits == 8 ? 255.0f : 65535.0f,
        };
        for (int a = 0; a < scale; a++) {
            uint32_t *line = (uint32_t *)call->buf[4] + ((size_t)scale * row + (size_t)a) * stride;
            for (uint32_t x0 = 0; x0 < cols; x0 += CHUNK) {
                float out[4 * CHUNK];
                const uint32_t n = cols - x0 < CHUNK ? cols - x0 : CHUNK;
                if (scale == 2) phases_2(&g, a, x0, n, out);
                else if (scale == 3) phases_3(&g, a, x0, n, out);
                else phases_4(&g, a, x0, n, out);
                pvr_scatter(bits, scale, step, line, component, left + x0, n, out, CHUNK, room);
            }
        }
    }
}
