/* SPDX-License-Identifier: Apache-2.0 */
/* Two rows of a 3x3 convolution and PReLU in float32, by Winograd's F(2x4, 3x3) (the matrices of Lavin and Gray,
 * 2015): two rows of four columns from 24 products for each pair of channels, where the sum itself has 72. Lanes
 * are tiles of four columns side by side. A row is transformed along x once, when it is made; down the rows each
 * product does that itself, with additions that cost nothing beside it. Tiles count from a row's first column and
 * from an even row of the frame: a value's sum is the same wherever cuts lie at whole tiles. */
#ifndef PVR_CONV_WINOGRAD_H
#define PVR_CONV_WINOGRAD_H

#include "conv.h"

enum {
    WIN_STEP = 4, WIN_POINTS = 6, /* columns of a tile of the result, and points of the input's */
    WIN_ROWS = 2, WIN_HIGH = 4,   /* the same down the rows */
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
    const float *x[WIN_HIGH]; /* transformed rows of input */
    const float *u;     /* transformed weights: [cout / each][point][WIN_HIGH][cin][each] */
    const float *bias, *slope;
    float *y;           /* rows of output, `row` apart: [cout][step][pitch] where phases, else [cout][pitch] */
    size_t cin, cout, pitch, row;
    int phases;
} pvr_win_row;

static inline vf win_get(const float *p) { return *(const vf *)p; }
static inline void win_put(float *p, vf v) { *(vf *)p = v; }

/* w: [cin][9][cout], as pvr_conv_row's. Down the rows the points are in the order 1, 2, 0, 3, in which they are
 * added (see PVR_WIN_BLOCK). */
static inline void pvr_win_weights(const float *w, size_t cin, size_t cout, float *u) {
    const size_t each = pvr_win_each(cout), point = WIN_HIGH * cin * each;
    for (size_t o = 0; o < cout; o++)
        for (size_t c = 0; c < cin; c++) {
            float rows[WIN_HIGH][3];
            for (size_t b = 0; b < 3; b++) {
                const float *k = w + (c * 9 + b) * cout + o;
                const float k0 = k[0], k1 = k[3 * cout], k2 = k[6 * cout];
                rows[0][b] = 0.5f * (k0 + k1 + k2);
                rows[1][b] = 0.5f * (k0 - k1 + k2);
                rows[2][b] = k0;
                rows[3][b] = k2;
            }
            for (size_t a = 0; a < WIN_HIGH; a++) {
                const float k0 = rows[a][0], k1 = rows[a][1], k2 = rows[a][2];
                const float s = (k0 + k2) / 6, t = k1 / 6, p = k0 / 24 + k2 / 6, q = k1 / 12;
                float *to = u + (o / each * WIN_POINTS * WIN_HIGH * cin + a * cin + c) * each + o % each;
                to[0] = k0 / 4;
                to[point] = -s - t;
                to[2 * point] = t - s;
                to[3 * point] = p + q;
                to[4 * point] = p - q;
                to[5 * point] = k2;
            }
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

/* A row of the first layer, which has so few channels that a transform gains nothing: as it is, but by columns of
 * tiles. */
typedef struct {
    const float *x[3]; /* rows of input, [cin][step][pitch] */
    const float *w;    /* as pvr_conv_row's */
    float *y;          /* a row of output, [cout][step][pitch] */
    size_t cin, cout, pitch;
} pvr_win_first;

enum { WIN_FIRST = CONV_MOST / 2 }; /* channels whose sums are held together */

/* The columns 0..n-1, up to whole vectors of tiles; reads a tile beyond them. */
static inline void pvr_win_direct(const pvr_win_first *g, size_t n) {
    for (size_t i = 0; i * WIN_STEP < n; i += VL)
        for (size_t o0 = 0; o0 < g->cout; o0 += WIN_FIRST) {
            const float *tail = g->w + g->cin * 9 * g->cout + o0, *k = g->w + o0;
            vf acc[WIN_FIRST][WIN_STEP];
            for (int o = 0; o < WIN_FIRST; o++)
                for (int j = 0; j < WIN_STEP; j++) acc[o][j] = (vf){0} + tail[o];
            for (size_t c = 0; c < g->cin; c++)
                for (size_t a = 0; a < 3; a++) {
                    const float *p = g->x[a] + c * WIN_STEP * g->pitch + i;
                    const vf d[6] = {
                        win_get(p), win_get(p + g->pitch), win_get(p + 2 * g->pitch), win_get(p + 3 * g->pitch),
                        win_get(p + 1), win_get(p + g->pitch + 1),
                    };
                    for (int b = 0; b < 3; b++, k += g->cout)
                        for (int o = 0; o < WIN_FIRST; o++)
                            for (int j = 0; j < WIN_STEP; j++) acc[o][j] += d[j + b] * k[o];
                }
            for (int o = 0; o < WIN_FIRST; o++)
                for (int j = 0; j < WIN_STEP; j++) {
                    float *y = g->y + ((o0 + (size_t)o) * WIN_STEP + (size_t)j) * g->pitch + i;
                    win_put(y, pvr_prelu(acc[o][j], tail[g->cout + (size_t)o]));
                }
        }
}

/* A row's four columns of an output channel from the points' sums, `apart` floats apart. */
static inline void win_result(const pvr_win_row *g, float *to, size_t o, size_t tile, const float *m,
                              size_t apart) {
    const vf m1 = win_get(m + apart), m2 = win_get(m + 2 * apart);
    const vf m3 = win_get(m + 3 * apart), m4 = win_get(m + 4 * apart);
    const vf a = m1 + m2, b = m1 - m2, c = m3 + m4, d = m3 - m4;
    vf y[WIN_STEP] = {
        win_get(m) + (a + c), b + 2.0f * d, a + 4.0f * c, b + 8.0f * d + win_get(m + 5 * apart),
    };
    for (int j = 0; j < WIN_STEP; j++) y[j] = pvr_prelu(y[j], g->slope[o]);
    if (!g->phases) {
        win_together(to + o * g->pitch + tile * WIN_STEP, y);
        return;
    }
    for (size_t j = 0; j < WIN_STEP; j++)
        win_put(to + (o * WIN_STEP + j) * g->pitch + tile, y[j]);
}

/* OC output channels from o0 on of NV vectors of tiles of a group. Down the rows the points are d1 + d2, d2 - d1,
 * d0 - d2 and d3 - d1 of the four rows, and the results m1 + m2 + m0 and m1 - m2 + m3. The bias goes into a point
 * that all columns and both rows have once. */
#define PVR_WIN_BLOCK(OC, NV)                                                                           \
    static inline __attribute__((always_inline)) void win_sum_##OC##_##NV(                              \
        vf acc[OC][NV], const float *a, const float *b, const int add, const float *k, size_t cin) {    \
        for (size_t c = 0; c < cin; c++, a += WIN_TILES, b += WIN_TILES, k += OC) {                     \
            vf t[NV];                                                                                   \
            for (int v = 0; v < NV; v++)                                                                \
                t[v] = add ? win_get(a + v * VL) + win_get(b + v * VL) : win_get(a + v * VL) - win_get(b + v * VL);\
            for (int o = 0; o < OC; o++)                                                                \
                for (int v = 0; v < NV; v++) acc[o][v] += t[v] * k[o];                                  \
        }                                                                                               \
    }                                                                                                   \
    static void win_block_##OC##_##NV(const pvr_win_row *g, size_t o0, size_t group) {                  \
        const size_t line = g->cin * WIN_TILES, at = group * WIN_POINTS * line, next = g->cin * OC;     \
        const float *k = g->u + o0 * WIN_POINTS * WIN_HIGH * g->cin;                                    \
        float m[WIN_ROWS][WIN_POINTS][OC][NV * VL];                                                     \
        for (size_t p = 0; p < WIN_POINTS; p++, k += WIN_HIGH * next) {                                 \
            const float *d0 = g->x[0] + at + p * line, *d1 = g->x[1] + at + p * line;                   \
            const float *d2 = g->x[2] + at + p * line, *d3 = g->x[3] + at + p * line;                   \
            vf acc[OC][NV];                                                                             \
            for (size_t o = 0; o < OC; o++)                                                             \
                for (int v = 0; v < NV; v++)                                                            \
                    acc[o][v] = (vf){0} + (p == 1 ? g->bias[o0 + o] : 0.0f);                            \
            win_sum_##OC##_##NV(acc, d1, d2, 1, k, g->cin);                                             \
            for (int o = 0; o < OC; o++)                                                                \
                for (int v = 0; v < NV; v++) {                                                          \
                    win_put(&m[1][p][o][v * VL], acc[o][v]);                                            \
                    acc[o][v] = (vf){0};                                                                \
                }                                                                                       \
            win_sum_##OC##_##NV(acc, d2, d1, 0, k + next, g->cin);                                      \
            for (int o = 0; o < OC; o++)                                                                \
                for (int v = 0; v < NV; v++) {                                                          \
                    const vf sum = win_get(&m[1][p][o][v * VL]);                                        \
                    win_put(&m[1][p][o][v * VL], sum - acc[o][v]);                                      \
                    acc[o][v] += sum;                                                                   \
                }                                                                                       \
            win_sum_##OC##_##NV(acc, d0, d2, 0, k + 2 * next, g->cin);                                  \
            for (int o = 0; o < OC; o++)                                                                \
                for (int v = 0; v < NV; v++) {                                                          \
                    win_put(&m[0][p][o][v * VL], acc[o][v]);                                            \
                    acc[o][v] = win_get(&m[1][p][o][v * VL]);                                           \
                }                                                                                       \
            win_sum_##OC##_##NV(acc, d3, d1, 0, k + 3 * next, g->cin);                                  \
            for (int o = 0; o < OC; o++)                                                                \
                for (int v = 0; v < NV; v++) win_put(&m[1][p][o][v * VL], acc[o][v]);                   \
        }                                                                                               \
        for (size_t r = 0; r < WIN_ROWS; r++)                                                           \
            for (size_t o = 0; o < OC; o++)                                                             \
                for (size_t v = 0; v < NV; v++)                                                         \
                    win_result(g, g->y + r * g->row, o0 + o, group * WIN_TILES + v * VL,                \
                               &m[r][0][o][v * VL], OC * NV * VL);                                      \
    }
PVR_WIN_BLOCK(4, 1)
PVR_WIN_BLOCK(4, 2)
PVR_WIN_BLOCK(8, 1)
PVR_WIN_BLOCK(8, 2)
#undef PVR_WIN_BLOCK

/* The columns 0..n-1 of both rows, up to whole vectors of tiles. */
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
