/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors run along x, weights are broadcast: no shuffles, and a pixel's sum has the same order
 * wherever it lies in a tile, so that tiled and untiled pictures are equal to the bit. */
#include "video.h"

/* 16 registers hold 4 channels of two vectors, 32 hold 8. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { MOST = 8 };
#else
enum { MOST = 4 };
#endif

typedef struct {
    const float *x; /* the window's corner in channel 0 */
    const float *w, *tail;
    float *y;
    size_t cin, cout, xs;
} block_args;

/* OC output channels of NV vectors. A macro, since both have to be constants for the registers. */
#define BLOCK(OC, NV)                                                                  \
    static void block_##OC##_##NV(const block_args *g) {                               \
        vf acc[OC][NV];                                                                \
        for (int o = 0; o < OC; o++)                                                   \
            for (int v = 0; v < NV; v++) acc[o][v] = (vf){0} + g->tail[o];             \
        const float *k = g->w;                                                         \
        for (size_t c = 0; c < g->cin; c++)                                            \
            for (size_t a = 0; a < 3; a++)                                             \
                for (size_t b = 0; b < 3; b++, k += g->cout) {                         \
                    const float *s = g->x + (a * g->cin + c) * g->xs + b;              \
                    vf t[NV];                                                          \
                    for (int v = 0; v < NV; v++) t[v] = *(const vf *)(s + v * VL);     \
                    for (int o = 0; o < OC; o++)                                       \
                        for (int v = 0; v < NV; v++) acc[o][v] += t[v] * k[o];         \
                }                                                                      \
        for (int o = 0; o < OC; o++)                                                   \
            for (int v = 0; v < NV; v++) {                                             \
                const vf r = acc[o][v], s = r * g->tail[g->cout + o];                  \
                const vi up = r > 0.0f;                                                \
                *(vf *)(g->y + o * g->xs + v * VL) = (vf)((up & (vi)r) | (~up & (vi)s)); \
            }                                                                          \
    }

BLOCK(4, 1)
BLOCK(4, 2)
BLOCK(8, 1)
BLOCK(8, 2)

PVR_OP(conv3x3) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const size_t cin = k[0], cout = k[1], rows = k[2], xs = k[3], x_tile = k[4], y_tile = k[5];
    const float *w = call->buf[2];
    const int each = MOST == 8 && cout % 8 == 0 ? 8 : 4;
    size_t begin, end;
    pvr_split(team, (size_t)p[PVR_N_TILES] * rows, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t tile = i / rows, row = i % rows;
        const float *line = (const float *)call->buf[1] + tile * x_tile + row * cin * xs;
        float *out = (float *)call->buf[3] + tile * y_tile + row * cout * xs;
        for (size_t x = 0; x < xs;) {
            const int two = x + 2 * VL <= xs;
            for (size_t o = 0; o < cout; o += (size_t)each) {
                const block_args g = {
                    line + x, w + o, w + cin * 9 * cout + o, out + o * xs + x, cin, cout, xs,
                };
                if (each == 8 && two) block_8_2(&g);
                else if (each == 8) block_8_1(&g);
                else if (two) block_4_2(&g);
                else block_4_1(&g);
            }
            x += two ? 2 * VL : VL;
        }
    }
}
