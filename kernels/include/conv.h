/* SPDX-License-Identifier: Apache-2.0 */
/* A row of a 3x3 convolution and PReLU in float32. Vectors run along x, weights are broadcast: no
 * shuffles, and a pixel's sum has the same order wherever it lies in a row, so that tiled and
 * untiled pictures are equal to the bit. */
#ifndef PVR_CONV_H
#define PVR_CONV_H

#include "video.h"

/* 16 registers hold 4 channels of two vectors, 32 hold 8. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { CONV_MOST = 8 };
#else
enum { CONV_MOST = 4 };
#endif

typedef struct {
    const float *x[3];  /* three rows of input, [cin][xs] */
    const float *w;     /* [cin][9][cout], bias [cout], slope [cout] */
    float *y;           /* a row of output, [cout][xs] */
    size_t cin, cout, xs;
} pvr_conv_row;

/* OC output channels from o on of NV vectors from column x on. A macro, since both have to be
 * constants for the registers. */
#define PVR_CONV_BLOCK(OC, NV)                                                           \
    static void conv_block_##OC##_##NV(const pvr_conv_row *g, size_t o0, size_t x) {     \
        const float *tail = g->w + g->cin * 9 * g->cout + o0, *k = g->w + o0;            \
        vf acc[OC][NV];                                                                  \
        for (int o = 0; o < OC; o++)                                                     \
            for (int v = 0; v < NV; v++) acc[o][v] = (vf){0} + tail[o];                  \
        for (size_t c = 0; c < g->cin; c++)                                              \
            for (size_t a = 0; a < 3; a++)                                               \
                for (size_t b = 0; b < 3; b++, k += g->cout) {                           \
                    const float *s = g->x[a] + c * g->xs + x + b;                        \
                    vf t[NV];                                                            \
                    for (int v = 0; v < NV; v++) t[v] = *(const vf *)(s + v * VL);       \
                    for (int o = 0; o < OC; o++)                                         \
                        for (int v = 0; v < NV; v++) acc[o][v] += t[v] * k[o];           \
                }                                                                        \
        for (int o = 0; o < OC; o++)                                                     \
            for (int v = 0; v < NV; v++) {                                               \
                float *y = g->y + (o0 + (size_t)o) * g->xs + x;                          \
                *(vf *)(y + v * VL) = pvr_prelu(acc[o][v], tail[g->cout + (size_t)o]);   \
            }                                                                            \
    }

PVR_CONV_BLOCK(4, 1)
PVR_CONV_BLOCK(4, 2)
PVR_CONV_BLOCK(8, 1)
PVR_CONV_BLOCK(8, 2)
#undef PVR_CONV_BLOCK

/* The columns 0..n-1, up to whole vectors; reads two columns and a vector beyond them. */
static inline void pvr_conv(const pvr_conv_row *g, size_t n) {
    const size_t each = CONV_MOST == 8 && g->cout % 8 == 0 ? 8 : 4;
    for (size_t x = 0; x < n;) {
        const int two = x + VL < n;
        for (size_t o = 0; o < g->cout; o += each) {
            if (each == 8 && two) conv_block_8_2(g, o, x);
            else if (each == 8) conv_block_8_1(g, o, x);
            else if (two) conv_block_4_2(g, o, x);
            else conv_block_4_1(g, o, x);
        }
        x += two ? 2 * VL : VL;
    }
}

#endif
