/* SPDX-License-Identifier: Apache-2.0 */
/* A row of a 3x3 convolution and PReLU in float32, by Winograd's F(4, 3) along x (the matrices of
 * Lavin and Gray, 2015): four columns from 18 products for each pair of channels, where the sum
 * itself has 36. Lanes are tiles of four columns side by side. A row is transformed once, when it is
 * made, and read by three rows of the next layer. Tiles count from a row's first column: a value's
 * sum is the same in every row whose first column lies at the same place among fours. */
#ifndef PVR_CONV_WINOGRAD_H
#define PVR_CONV_WINOGRAD_H

#include "conv.h"

enum {
    WIN_STEP = 4, WIN_POINTS = 6, /* columns of a tile of the result, and points of the input's */
    WIN_TILES = 2 * VL,           /* tiles of a group, and its columns */
    WIN_GROUP = WIN_STEP * WIN_TILES,
};

/* Floats of a transformed row of so many columns: [group][point][channel][WIN_TILES]. */
static inline size_t pvr_win_floats(size_t channels, size_t columns) {
    return (columns + WIN_GROUP - 1) / WIN_GROUP * WIN_POINTS * channels * WIN_TILES;
}

/* Columns of input that whole tiles read for n columns of a result. */
static inline size_t pvr_win_reach(size_t n) { return (n + WIN_STEP - 1) / WIN_STEP * WIN_STEP + 2; }

/* Output channels whose sums are held together. */
static inline size_t pvr_win_each(size_t cout) { return CONV_MOST == 8 && cout % 8 == 0 ? 8 : 4; }

typedef struct {
    const float *x[3];  /* three transformed rows of input */
    const float *u;     /* transformed weights: [cout / each][point][3][cin][each] */
    const float *bias, *slope;
    float *y;           /* a row of output: [cout][step][pitch] where phases, else [cout][pitch] */
    size_t cin, cout, pitch;
    int phases;
} pvr_win_row;

static inline vf win_get(const float *p) { return *(const vf *)p; }
static inline void win_put(float *p, vf v) { *(vf *)p = v; }

/* w: [cin][9][cout], as pvr_conv_row's. */
static inline void pvr_win_weights(const float *w, size_t cin, size_t cout, float *u) {
    const size_t each = pvr_win_each(cout), point = 3 * cin * each;
    for (size_t o = 0; o < cout; o++)
        for (size_t a = 0; a < 3; a++)
            for (size_t c = 0; c < cin; c++) {
                const float *k = w + (c * 9 + a * 3) * cout + o;
                const float k0 = k[0], k1 = k[cout], k2 = k[2 * cout];
                const float s = (k0 + k2) / 6, t = k1 / 6, p = k0 / 24 + k2 / 6, q = k1 / 12;
                float *to = u + (o / each * WIN_POINTS * 3 * cin + a * cin + c) * each + o % each;
                to[0] = k0 / 4;
                to[point] = -s - t;
                to[2 * point] = t - s;
                to[3 * point] = p + q;
                to[4 * point] = p - q;
                to[5 * point] = k2;
            }
}

/* The points of a vector of tiles: of columns d[0..5] of each. `apart`: from a point to the next. */
static inline void win_points(const vf d[6], float *to, size_t apart) {
    const vf a = d[4] - 4.0f * d[2], b = d[3] - 4.0f * d[1];
    const vf c = d[4] - d[2], e = 2.0f * (d[3] - d[1]);
    win_put(to, 4.0f * d[0] + (d[4] - 5.0f * d[2]));
    win_put(to + apart, a + b);
    win_put(to + 2 * apart, a - b);
    win_put(to + 3 * apart, c + e);
    win_put(to + 4 * apart, c - e);
    win_put(to + 5 * apart, 4.0f * d[1] + (d[5] - 5.0f * d[3]));
}

/* Where a vector of tiles of a channel begins in a transformed row. */
static inline size_t win_place(size_t channels, size_t c, size_t tile) {
    return (tile / WIN_TILES * WIN_POINTS * channels + c) * WIN_TILES + tile % WIN_TILES;
}

/* A row [channels][step][pitch] transformed, for tiles of `columns` columns; reads a vector beyond
 * them. */
static inline void pvr_win_transform(const float *x, size_t channels, size_t pitch, size_t columns,
                                     float *to) {
    const size_t tiles = (columns + WIN_STEP - 1) / WIN_STEP;
    for (size_t i = 0; i < tiles; i += VL)
        for (size_t c = 0; c < channels; c++) {
            const float *p = x + c * WIN_STEP * pitch + i;
            const vf d[6] = {
                win_get(p), win_get(p + pitch), win_get(p + 2 * pitch), win_get(p + 3 * pitch),
                win_get(p + 1), win_get(p + pitch + 1),
            };
            win_points(d, to + win_place(channels, c, i), channels * WIN_TILES);
        }
}

/* Every second lane of two vectors, and back. */
#if VL == 16
#define WIN_ALL(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)
#elif VL == 8
#define WIN_ALL(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7)
#else
#define WIN_ALL(F) F(0), F(1), F(2), F(3)
#endif
#define WIN_EVEN(i) 2 * i
#define WIN_ODD(i) 2 * i + 1
#define WIN_LOW(i) i / 2 + i % 2 * VL
#define WIN_HIGH(i) VL / 2 + i / 2 + i % 2 * VL
#define WIN_PICK(NAME, F)                                                                    \
    static inline vf NAME(vf a, vf b) { return __builtin_shufflevector(a, b, WIN_ALL(F)); }
WIN_PICK(win_even, WIN_EVEN)
WIN_PICK(win_odd, WIN_ODD)
WIN_PICK(win_low, WIN_LOW)
WIN_PICK(win_high, WIN_HIGH)
#undef WIN_PICK

/* The four columns of VL tiles from p on. */
static inline void win_apart(const float *p, vf out[WIN_STEP]) {
    const vf a = win_get(p), b = win_get(p + VL), c = win_get(p + 2 * VL), d = win_get(p + 3 * VL);
    const vf e0 = win_even(a, b), e1 = win_even(c, d), o0 = win_odd(a, b), o1 = win_odd(c, d);
    out[0] = win_even(e0, e1);
    out[1] = win_even(o0, o1);
    out[2] = win_odd(e0, e1);
    out[3] = win_odd(o0, o1);
}

/* The columns of VL tiles in their order. */
static inline void win_together(float *p, const vf in[WIN_STEP]) {
    const vf e0 = win_low(in[0], in[2]), e1 = win_high(in[0], in[2]);
    const vf o0 = win_low(in[1], in[3]), o1 = win_high(in[1], in[3]);
    win_put(p, win_low(e0, o0));
    win_put(p + VL, win_high(e0, o0));
    win_put(p + 2 * VL, win_low(e1, o1));
    win_put(p + 3 * VL, win_high(e1, o1));
}

/* A row [channels][xs] as [channels][step][pitch], so many columns in whole vectors of tiles. */
static inline void pvr_win_split(const float *x, size_t channels, size_t xs, size_t columns,
                                 float *y, size_t pitch) {
    for (size_t c = 0; c < channels; c++)
        for (size_t i = 0; i < columns; i += WIN_STEP * VL) {
            vf d[WIN_STEP];
            win_apart(x + c * xs + i, d);
            for (size_t j = 0; j < WIN_STEP; j++)
                win_put(y + (c * WIN_STEP + j) * pitch + i / WIN_STEP, d[j]);
        }
}

/* Four columns of an output channel from the points' sums, `apart` floats apart. */
static inline void win_result(const pvr_win_row *g, size_t o, size_t tile, const float *m,
                              size_t apart) {
    const vf m1 = win_get(m + apart), m2 = win_get(m + 2 * apart);
    const vf m3 = win_get(m + 3 * apart), m4 = win_get(m + 4 * apart);
    const vf a = m1 + m2, b = m1 - m2, c = m3 + m4, d = m3 - m4;
    vf y[WIN_STEP] = {
        win_get(m) + (a + c), b + 2.0f * d, a + 4.0f * c, b + 8.0f * d + win_get(m + 5 * apart),
    };
    for (int j = 0; j < WIN_STEP; j++) y[j] = pvr_prelu(y[j], g->slope[o]);
    if (!g->phases) {
        win_together(g->y + o * g->pitch + tile * WIN_STEP, y);
        return;
    }
    for (size_t j = 0; j < WIN_STEP; j++)
        win_put(g->y + (o * WIN_STEP + j) * g->pitch + tile, y[j]);
}

/* OC output channels from o0 on of NV vectors of tiles of a group. The bias goes into a point that all
 * four columns have once. */
#define PVR_WIN_BLOCK(OC, NV)                                                                \
    static void win_block_##OC##_##NV(const pvr_win_row *g, size_t o0, size_t group) {       \
        const size_t line = g->cin * WIN_TILES, at = group * WIN_POINTS * line;              \
        const float *k = g->u + o0 * WIN_POINTS * 3 * g->cin;                                \
        float m[WIN_POINTS][OC][NV * VL];                                                    \
        for (size_t p = 0; p < WIN_POINTS; p++) {                                            \
            vf acc[OC][NV];                                                                  \
            for (size_t o = 0; o < OC; o++)                                                  \
                for (int v = 0; v < NV; v++)                                                 \
                    acc[o][v] = (vf){0} + (p == 1 ? g->bias[o0 + o] : 0.0f);                 \
            for (size_t a = 0; a < 3; a++) {                                                 \
                const float *s = g->x[a] + at + p * line;                                    \
                for (size_t c = 0; c < g->cin; c++, s += WIN_TILES, k += OC) {               \
                    vf t[NV];                                                                \
                    for (int v = 0; v < NV; v++) t[v] = win_get(s + v * VL);                 \
                    for (int o = 0; o < OC; o++)                                             \
                        for (int v = 0; v < NV; v++) acc[o][v] += t[v] * k[o];               \
                }                                                                            \
            }                                                                                \
            for (int o = 0; o < OC; o++)                                                     \
                for (int v = 0; v < NV; v++) win_put(&m[p][o][v * VL], acc[o][v]);           \
        }                                                                                    \
        for (size_t o = 0; o < OC; o++)                                                      \
            for (size_t v = 0; v < NV; v++)                                                  \
                win_result(g, o0 + o, group * WIN_TILES + v * VL, &m[0][o][v * VL], OC * NV * VL); \
    }
PVR_WIN_BLOCK(4, 1)
PVR_WIN_BLOCK(4, 2)
PVR_WIN_BLOCK(8, 1)
PVR_WIN_BLOCK(8, 2)
#undef PVR_WIN_BLOCK

/* The columns 0..n-1, up to whole vectors of tiles. */
static inline void pvr_win_conv(const pvr_win_row *g, size_t n) {
    const size_t each = pvr_win_each(g->cout);
    for (size_t group = 0; group * WIN_GROUP < n; group++) {
        const int two = group * WIN_GROUP + WIN_GROUP / 2 < n;
        for (size_t o = 0; o < g->cout; o += each) {
            if (each == 8) (two ? win_block_8_2 : win_block_8_1)(g, o, group);
            else (two ? win_block_4_2 : win_block_4_1)(g, o, group);
        }
    }
}

#endif
