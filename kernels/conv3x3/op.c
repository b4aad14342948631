/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors run along x, weights are broadcast: no shuffles, and a pixel's sum has the same order wherever it lies
 * in a tile, so that tiled and untiled pictures are equal to the bit. */
#include "video.h"

/* OC output channels of NV vectors; x is the window's corner in channel 0, the next row is row_step floats on. */
#define BLOCK(OC, NV)                                                                                         \
    static inline __attribute__((always_inline)) void block_##OC##_##NV(                                      \
        const float *x, const float *w, const float *tail, float *y, size_t cin, size_t cout, size_t xs) {    \
        vf acc[OC][NV];                                                                                       \
        for (int o = 0; o < OC; o++)                                                                          \
            for (int v = 0; v < NV; v++) acc[o][v] = (vf){0} + tail[o];                                       \
        for (size_t c = 0; c < cin; c++)                                                                      \
            for (size_t a = 0; a < 3; a++)                                                                    \
                for (size_t b = 0; b < 3; b++) {                                                              \
                    const float *s = x + (a * cin + c) * xs + b, *k = w + (c * 9 + a * 3 + b) * cout;         \
                    vf t[NV];                                                                                 \
                    for (int v = 0; v < NV; v++) t[v] = *(const vf *)(s + v * VL);                            \
                    for (int o = 0; o < OC; o++)                                                              \
                        for (int v = 0; v < NV; v++) acc[o][v] += t[v] * k[o];                                \
                }                                                                                             \
        for (int o = 0; o < OC; o++)                                                                          \
            for (int v = 0; v < NV; v++) {                                                                    \
                const vf r = acc[o][v], s = r * tail[cout + o];                                               \
                const vi up = r > 0.0f;                                                                       \
                *(vf *)(y + o * xs + v * VL) = (vf)((up & (vi)r) | (~up & (vi)s));                            \
            }                                                                                                 \
    }

BLOCK(4, 1)
BLOCK(4, 2)
BLOCK(8, 1)
BLOCK(8, 2)

PVR_OP(conv3x3) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const size_t cin = k[0], cout = k[1], rows = k[2], xs = k[3], x_tile = k[4], y_tile = k[5];
    const float *w = call->buf[2], *tail = w + cin * 9 * cout;
    /* 16 registers hold 4 channels of two vectors, 32 hold 8. */
    const int wide = (VL != 8) && cout % 8 == 0;
    const size_t each = wide ? 8 : 4;
    size_t begin, end;
    pvr_split(team, (size_t)p[PVR_N_TILES] * rows, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t tile = i / rows, row = i % rows;
        const float *line = (const float *)call->buf[1] + tile * x_tile + row * cin * xs;
        float *out = (float *)call->buf[3] + tile * y_tile + row * cout * xs;
        for (size_t x = 0; x < xs;) {
            const int two = x + 2 * VL <= xs;
            for (size_t o = 0; o < cout; o += each) {
                const float *s = line + x;
                float *y = out + o * xs + x;
                if (wide && two) block_8_2(s, w + o, tail + o, y, cin, cout, xs);
                else if (wide) block_8_1(s, w + o, tail + o, y, cin, cout, xs);
                else if (two) block_4_2(s, w + o, tail + o, y, cin, cout, xs);
                else block_4_1(s, w + o, tail + o, y, cin, cout, xs);
            }
            x += two ? 2 * VL : VL;
        }
    }
}
