/* SPDX-License-Identifier: Apache-2.0 */
/* Two rows of a 3x3 convolution and PReLU in float32, by Winograd's F(2x4, 3x3) (the matrices of Lavin and Gray,
 * 2015): two rows of four columns from 24 products for each pair of channels, where the sum itself has 72. Lanes
 * are tiles of four columns side by side. A row is transformed along x when it is made, from the last tile to the
 * first: a tile's last two points need the first two columns of the next. Down the rows each product does that
 * itself, with additions that cost little beside it. Tiles count from a row's first column and from an even row of
 * the frame: a value's sum is the same wherever cuts lie at whole tiles. */
#ifndef PVR_CONV_WINOGRAD_H
#define PVR_CONV_WINOGRAD_H

#include "video.h"

/* 32 registers hold both sums of 8 channels, 16 one of 4 channels and two vectors. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define WIN_WIDE
enum { WIN_MOST = 8, WIN_VECTORS = 1 };
#else
enum { WIN_MOST = 4, WIN_VECTORS = 2 };
#endif

enum {
    WIN_STEP = 4, WIN_POINTS = 6, /* columns of a tile of the result, and points of the input's */
    WIN_ROWS = 2, WIN_HIGH = 4,   /* the same down the rows */
    WIN_TILES = WIN_VECTORS * VL, /* tiles of a group: a block's */
    WIN_GROUP = WIN_STEP * WIN_TILES,
};

/* Floats of a transformed row of so many columns: [group][point][channel][WIN_TILES]. */
static inline size_t pvr_win_floats(size_t channels, size_t columns) {
    return (columns + WIN_GROUP - 1) / WIN_GROUP * WIN_POINTS * channels * WIN_TILES;
}

/* Output channels whose sums are held together. */
static inline size_t pvr_win_each(size_t cout) { return WIN_MOST == 8 && cout % 8 == 0 ? 8 : 4; }

typedef struct {
    const float *x[WIN_HIGH]; /* transformed rows of input */
    const float *u;     /* transformed weights: [cout / each][point][WIN_HIGH][cin][each] */
    const float *bias, *slope;
    float *y;           /* rows of output, `row` apart: transformed where `next`, else [cout][pitch] */
    float *next;        /* [WIN_ROWS][cout][2][VL]: the first columns of the tiles that were made before */
    size_t cin, cout, pitch, row;
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
    const vf c = d[4] - d[2], e = d[3] - d[1], f = e + e;
    win_put(to, 4.0f * (d[0] - d[2]) + c);
    win_put(to + apart, a + b);
    win_put(to + 2 * apart, a - b);
    win_put(to + 3 * apart, c + f);
    win_put(to + 4 * apart, c - f);
    win_put(to + 5 * apart, (d[5] - d[3]) - 4.0f * e);
}

/* Where a vector of tiles of a channel begins in a transformed row. */
static inline size_t win_place(size_t channels, size_t c, size_t tile) {
    return (tile / WIN_TILES * WIN_POINTS * channels + c) * WIN_TILES + tile % WIN_TILES;
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
#define WIN_UPPER(i) VL / 2 + i / 2 + i % 2 * VL
#define WIN_NEXT(i) i + 1
#define WIN_PICK(NAME, F)                                                                    \
    static inline vf NAME(vf a, vf b) { return __builtin_shufflevector(a, b, WIN_ALL(F)); }
WIN_PICK(win_even, WIN_EVEN)
WIN_PICK(win_odd, WIN_ODD)
WIN_PICK(win_low, WIN_LOW)
WIN_PICK(win_upper, WIN_UPPER)
WIN_PICK(win_after, WIN_NEXT) /* a's lanes but the first, and the first of b */
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
    const vf e0 = win_low(in[0], in[2]), e1 = win_upper(in[0], in[2]);
    const vf o0 = win_low(in[1], in[3]), o1 = win_upper(in[1], in[3]);
    win_put(p, win_low(e0, o0));
    win_put(p + VL, win_upper(e0, o0));
    win_put(p + 2 * VL, win_low(e1, o1));
    win_put(p + 3 * VL, win_upper(e1, o1));
}

/* A row [channels][xs] transformed, for tiles of so many columns; reads a vector beyond them. */
static inline void pvr_win_enter(const float *x, size_t channels, size_t xs, size_t columns, float *to) {
    for (size_t c = 0; c < channels; c++)
        for (size_t i = 0; i < columns; i += WIN_STEP * VL) {
            const float *p = x + c * xs + i;
            vf d[6];
            win_apart(p, d);
            d[4] = win_after(d[0], (vf){0} + p[WIN_STEP * VL]);
            d[5] = win_after(d[1], (vf){0} + p[WIN_STEP * VL + 1]);
            win_points(d, to + win_place(channels, c, i / WIN_STEP), channels * WIN_TILES);
        }
}

/* Four columns of an output channel in row r from the points' sums, `apart` floats apart. */
static inline void win_result(const pvr_win_row *g, size_t r, size_t o, size_t tile, const float *m, size_t apart) {
    const vf m1 = win_get(m + apart), m2 = win_get(m + 2 * apart);
    const vf m3 = win_get(m + 3 * apart), m4 = win_get(m + 4 * apart);
    const vf a = m1 + m2, b = m1 - m2, c = m3 + m4, e = m3 - m4, d = e + e;
    vf y[6] = {
        win_get(m) + (a + c), b + d, a + 4.0f * c, b + 4.0f * d + win_get(m + 5 * apart),
    };
    for (int j = 0; j < WIN_STEP; j++) y[j] = pvr_prelu(y[j], g->slope[o]);
    float *to = g->y + r * g->row;
    if (!g->next) {
        win_together(to + o * g->pitch + tile * WIN_STEP, y);
        return;
    }
    float *next = g->next + (r * g->cout + o) * 2 * VL;
    y[4] = win_after(y[0], win_get(next));
    y[5] = win_after(y[1], win_get(next + VL));
    win_put(next, y[0]);
    win_put(next + VL, y[1]);
    win_points(y, to + win_place(g->cout, o, tile), g->cout * WIN_TILES);
}

/* OC output channels from o0 on of a group of tiles. Down the rows the points are d1 + d2, d2 - d1, d0 - d2 and
 * d3 - d1 of the four rows, and the results m1 + m2 + m0 and m1 - m2 + m3. The bias goes into a point that all
 * columns and both rows have once. */
#if defined(WIN_WIDE)
#define PVR_WIN_BLOCK(OC)                                                                                        \
    static void win_block_##OC(const pvr_win_row *g, size_t o0, size_t group) {                                  \
        const size_t line = g->cin * VL, next = g->cin * OC, at = group * WIN_POINTS * line;                     \
        const float *k = g->u + o0 * WIN_POINTS * WIN_HIGH * g->cin;                                             \
        float m[WIN_ROWS][WIN_POINTS][OC][VL];                                                                   \
        for (size_t p = 0; p < WIN_POINTS; p++, k += WIN_HIGH * next) {                                          \
            const float *d0 = g->x[0] + at + p * line, *d1 = g->x[1] + at + p * line;                            \
            const float *d2 = g->x[2] + at + p * line, *d3 = g->x[3] + at + p * line;                            \
            vf a[OC], b[OC];                                                                                     \
            for (size_t o = 0; o < OC; o++) {                                                                    \
                a[o] = (vf){0} + (p == 1 ? g->bias[o0 + o] : 0.0f);                                              \
                b[o] = (vf){0};                                                                                  \
            }                                                                                                    \
            for (size_t c = 0; c < g->cin; c++) {                                                                \
                const vf x = win_get(d1 + c * VL), y = win_get(d2 + c * VL), s = x + y, t = y - x;               \
                const float *u = k + c * OC, *v = u + next;                                                      \
                for (int o = 0; o < OC; o++) a[o] += s * u[o], b[o] += t * v[o];                                 \
            }                                                                                                    \
            for (int o = 0; o < OC; o++) {                                                                       \
                const vf sum = a[o];                                                                             \
                a[o] = sum + b[o];                                                                               \
                b[o] = sum - b[o];                                                                               \
            }                                                                                                    \
            for (size_t c = 0; c < g->cin; c++) {                                                                \
                const vf s = win_get(d0 + c * VL) - win_get(d2 + c * VL);                                        \
                const vf t = win_get(d3 + c * VL) - win_get(d1 + c * VL);                                        \
                const float *u = k + 2 * next + c * OC, *v = u + next;                                           \
                for (int o = 0; o < OC; o++) a[o] += s * u[o], b[o] += t * v[o];                                 \
            }                                                                                                    \
            for (int o = 0; o < OC; o++) {                                                                       \
                win_put(m[0][p][o], a[o]);                                                                       \
                win_put(m[1][p][o], b[o]);                                                                       \
            }                                                                                                    \
        }                                                                                                        \
        for (size_t r = 0; r < WIN_ROWS; r++)                                                                    \
            for (size_t o = 0; o < OC; o++) win_result(g, r, o0 + o, group * VL, m[r][0][o], OC * VL);           \
    }
#else
/* The same for two vectors of tiles, which registers have room for one sum of: the other one waits in memory. */
#define PVR_WIN_BLOCK(OC)                                                                                         \
    static inline __attribute__((always_inline)) void win_sum_##OC(                                               \
        vf acc[OC][2], const float *a, const float *b, const int add, const float *k, size_t cin) {               \
        for (size_t c = 0; c < cin; c++, a += WIN_TILES, b += WIN_TILES, k += OC) {                               \
            vf t[2];                                                                                              \
            for (int v = 0; v < 2; v++) {                                                                         \
                const vf x = win_get(a + v * VL), y = win_get(b + v * VL);                                        \
                t[v] = add ? x + y : x - y;                                                                       \
            }                                                                                                     \
            for (int o = 0; o < OC; o++)                                                                          \
                for (int v = 0; v < 2; v++) acc[o][v] += t[v] * k[o];                                             \
        }                                                                                                         \
    }                                                                                                             \
    static void win_block_##OC(const pvr_win_row *g, size_t o0, size_t group) {                                   \
        const size_t line = g->cin * WIN_TILES, next = g->cin * OC, at = group * WIN_POINTS * line;               \
        const float *k = g->u + o0 * WIN_POINTS * WIN_HIGH * g->cin;                                              \
        float m[WIN_ROWS][WIN_POINTS][OC][WIN_TILES];                                                             \
        for (size_t p = 0; p < WIN_POINTS; p++, k += WIN_HIGH * next) {                                           \
            const float *d0 = g->x[0] + at + p * line, *d1 = g->x[1] + at + p * line;                             \
            const float *d2 = g->x[2] + at + p * line, *d3 = g->x[3] + at + p * line;                             \
            vf acc[OC][2];                                                                                        \
            for (size_t o = 0; o < OC; o++)                                                                       \
                for (int v = 0; v < 2; v++) acc[o][v] = (vf){0} + (p == 1 ? g->bias[o0 + o] : 0.0f);              \
            win_sum_##OC(acc, d1, d2, 1, k, g->cin);                                                              \
            for (int o = 0; o < OC; o++)                                                                          \
                for (int v = 0; v < 2; v++) {                                                                     \
                    win_put(&m[1][p][o][v * VL], acc[o][v]);                                                      \
                    acc[o][v] = (vf){0};                                                                          \
                }                                                                                                 \
            win_sum_##OC(acc, d2, d1, 0, k + next, g->cin);                                                       \
            for (int o = 0; o < OC; o++)                                                                          \
                for (int v = 0; v < 2; v++) {                                                                     \
                    const vf sum = win_get(&m[1][p][o][v * VL]);                                                  \
                    win_put(&m[1][p][o][v * VL], sum - acc[o][v]);                                                \
                    acc[o][v] += sum;                                                                             \
                }                                                                                                 \
            win_sum_##OC(acc, d0, d2, 0, k + 2 * next, g->cin);                                                   \
            for (int o = 0; o < OC; o++)                                                                          \
                for (int v = 0; v < 2; v++) {                                                                     \
                    win_put(&m[0][p][o][v * VL], acc[o][v]);                                                      \
                    acc[o][v] = win_get(&m[1][p][o][v * VL]);                                                     \
                }                                                                                                 \
            win_sum_##OC(acc, d3, d1, 0, k + 3 * next, g->cin);                                                   \
            for (int o = 0; o < OC; o++)                                                                          \
                for (int v = 0; v < 2; v++) win_put(&m[1][p][o][v * VL], acc[o][v]);                              \
        }                                                                                                         \
        for (size_t r = 0; r < WIN_ROWS; r++)                                                                     \
            for (size_t o = 0; o < OC; o++)                                                                       \
                for (size_t v = 2; v--;)                                                                          \
                    win_result(g, r, o0 + o, group * WIN_TILES + v * VL, &m[r][0][o][v * VL], OC * WIN_TILES);    \
    }
#endif
PVR_WIN_BLOCK(4)
#if defined(WIN_WIDE)
PVR_WIN_BLOCK(8)
#endif
#undef PVR_WIN_BLOCK

/* The columns 0..n-1 of both rows, up to whole groups. */
static inline void pvr_win_conv(const pvr_win_row *g, size_t n) {
    for (size_t i = 0; g->next && i < WIN_ROWS * g->cout * 2 * VL; i++) g->next[i] = 0;
    for (size_t group = (n + WIN_GROUP - 1) / WIN_GROUP; group--;)
        for (size_t o = 0; o < g->cout; o += pvr_win_each(g->cout)) {
#if defined(WIN_WIDE)
            if (pvr_win_each(g->cout) == 8) {
                win_block_8(g, o, group);
                continue;
            }
#endif
            win_block_4(g, o, group);
        }
}

#endif
