/* SPDX-License-Identifier: Apache-2.0 */
/* Winograd's F(2x4, 3x3): two rows and four columns at a time from 24 products for each pair of channels,
 * where the sum itself has 72; the matrices of Lavin and Gray (2015). Lanes are tiles side by side, weights
 * are broadcast. Rows come in pairs and columns in fours from the map's own corner: a value's sum has the same
 * order in every tile of a picture whose sides fit these. */
#include "video.h"

enum {
    HIGH = 4, ACROSS = 6, POINTS = HIGH * ACROSS, /* of a tile of the input */
    STEP = 4,                                     /* columns of a tile of the result */
    SOME = 8,                                     /* output channels at a time: their sums stay in the first cache */
};
#if VL == 16
enum { VECTORS = 2, EACH = 8 }; /* of tiles, and channels: what the registers hold sums of */
#elif defined(__aarch64__)
enum { VECTORS = 2, EACH = 8 };
#else
enum { VECTORS = 2, EACH = 4 };
#endif

typedef struct {
    const float *x; /* [row][cin][xs] */
    const float *w; /* as conv3x3's */
    const float *u; /* transformed: [cout / SOME][POINTS][cin][SOME] */
    float *v;       /* [POINTS], `point` apart: [cin][VECTORS * VL] */
    float *y;
    size_t cin, cout, xs;
} wide;

static inline vf get(const float *p) { return *(const vf *)p; }
static inline void put(float *p, vf v) { *(vf *)p = v; }

/* Floats from a point of v to the next: no power of two, whose addresses would share few lines of the cache. */
static inline size_t point(size_t cin) { return cin * VECTORS * VL + 16; }

/* Every second lane of two vectors, and back. */
#if VL == 16
#define ALL(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)
#elif VL == 8
#define ALL(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7)
#else
#define ALL(F) F(0), F(1), F(2), F(3)
#endif
#define EVEN(i) 2 * i
#define ODD(i) 2 * i + 1
#define LOW(i) i / 2 + i % 2 * VL
#define HIGHER(i) VL / 2 + i / 2 + i % 2 * VL
#define NEXT(i) i + 1
#define PICK(NAME, F)                                                                                        \
    static inline vf NAME(vf a, vf b) { return __builtin_shufflevector(a, b, ALL(F)); }
PICK(even, EVEN)
PICK(odd, ODD)
PICK(lower, LOW)
PICK(higher, HIGHER)
PICK(after, NEXT) /* a's lanes but the first, and the first of b */

/* The four columns of VL tiles. */
static inline void apart(const float *p, vf out[STEP]) {
    const vf a = get(p), b = get(p + VL), c = get(p + 2 * VL), d = get(p + 3 * VL);
    const vf e0 = even(a, b), e1 = even(c, d), o0 = odd(a, b), o1 = odd(c, d);
    out[0] = even(e0, e1);
    out[1] = even(o0, o1);
    out[2] = odd(e0, e1);
    out[3] = odd(o0, o1);
}

static inline void together(float *p, const vf in[STEP]) {
    const vf e0 = lower(in[0], in[2]), e1 = higher(in[0], in[2]);
    const vf o0 = lower(in[1], in[3]), o1 = higher(in[1], in[3]);
    put(p, lower(e0, o0));
    put(p + VL, higher(e0, o0));
    put(p + 2 * VL, lower(e1, o1));
    put(p + 3 * VL, higher(e1, o1));
}

/* A row of the input's tiles, transformed along x. */
static inline void input_row(const float *p, vf out[ACROSS]) {
    vf d[STEP];
    apart(p, d);
    const vf d4 = after(d[0], (vf){0} + p[STEP * VL]), d5 = after(d[1], (vf){0} + p[STEP * VL + 1]);
    const vf a = d4 - 4.0f * d[2], b = d[3] - 4.0f * d[1], c = d4 - d[2], e = 2.0f * (d[3] - d[1]);
    out[0] = 4.0f * d[0] + (d4 - 5.0f * d[2]);
    out[1] = a + b;
    out[2] = a - b;
    out[3] = c + e;
    out[4] = c - e;
    out[5] = 4.0f * d[1] + (d5 - 5.0f * d[3]);
}

/* The tiles of `n` vectors from column x of four rows on. */
static void transform_input(const wide *g, size_t x, int n) {
    const size_t line = g->cin * g->xs;
    for (size_t c = 0; c < g->cin; c++)
        for (int i = 0; i < n; i++) {
            const float *p = g->x + c * g->xs + x + (size_t)i * VL * STEP;
            float *v = g->v + c * VECTORS * VL + (size_t)i * VL;
            const size_t each = point(g->cin);
            vf r[HIGH][ACROSS];
            for (size_t j = 0; j < HIGH; j++) input_row(p + j * line, r[j]);
            for (size_t j = 0; j < ACROSS; j++) {
                put(v + j * each, r[0][j] - r[2][j]);
                put(v + (ACROSS + j) * each, r[1][j] + r[2][j]);
                put(v + (2 * ACROSS + j) * each, r[2][j] - r[1][j]);
                put(v + (3 * ACROSS + j) * each, r[1][j] - r[3][j]);
            }
        }
}

/* The products of a point: m[channel][tile] = sum over c of u[c][channel] * v[c][tile]. */
#define PRODUCTS(NV)                                                                                         \
    static inline void products_##NV(const float *u, const float *v, size_t cin, float *m) {                  \
        for (int first = 0; first < SOME; first += EACH) {                                                    \
            vf sum[EACH][NV];                                                                                 \
            for (int o = 0; o < EACH; o++)                                                                    \
                for (int i = 0; i < NV; i++) sum[o][i] = (vf){0};                                             \
            for (size_t c = 0; c < cin; c++) {                                                                \
                const float *k = u + c * SOME + first;                                                        \
                vf t[NV];                                                                                     \
                for (int i = 0; i < NV; i++) t[i] = get(v + (c * VECTORS + (size_t)i) * VL);                  \
                for (int o = 0; o < EACH; o++)                                                                \
                    for (int i = 0; i < NV; i++) sum[o][i] += t[i] * k[o];                                    \
            }                                                                                                 \
            for (int o = 0; o < EACH; o++)                                                                    \
                for (int i = 0; i < NV; i++) put(m + ((first + o) * VECTORS + i) * VL, sum[o][i]);            \
        }                                                                                                     \
    }
PRODUCTS(1)
PRODUCTS(2)

/* Four columns of a row of the result, from a row of six. */
static inline void output_row(const vf m[ACROSS], vf out[STEP]) {
    const vf a = m[1] + m[2], b = m[1] - m[2], c = m[3] + m[4], d = m[3] - m[4];
    out[0] = m[0] + (a + c);
    out[1] = b + 2.0f * d;
    out[2] = a + 4.0f * c;
    out[3] = b + 8.0f * d + m[5];
}

/* Two rows of a vector of tiles of a channel. m: [POINTS][SOME][VECTORS * VL]. */
static inline void transform_output(const wide *g, const float *m, size_t channel, size_t x) {
    const float *tail = g->w + g->cin * 9 * g->cout + channel;
    const float bias = tail[0], slope = tail[g->cout];
    vf row[2][ACROSS];
    for (size_t j = 0; j < ACROSS; j++) {
        vf t[HIGH];
        for (size_t i = 0; i < HIGH; i++) t[i] = get(m + (ACROSS * i + j) * SOME * VECTORS * VL);
        row[0][j] = t[0] + t[1] + t[2];
        row[1][j] = t[1] - t[2] - t[3];
    }
    for (size_t i = 0; i < 2; i++) {
        vf out[STEP];
        output_row(row[i], out);
        for (int j = 0; j < STEP; j++) {
            const vf r = out[j] + bias, s = r * slope;
            const vi up = r > 0.0f;
            out[j] = (vf)((up & (vi)r) | (~up & (vi)s));
        }
        together(g->y + (i * g->cout + channel) * g->xs + x, out);
    }
}

/* Lines of memory that are asked for before they are needed: a CPU foresees rows in their order, not the pieces of
 * far channels. */
typedef struct {
    const float *at, *end;
} ahead;
static inline void ask(ahead *a, size_t lines) {
    for (; lines-- && a->at < a->end; a->at += 16) __builtin_prefetch(a->at, 0, 3);
}
/* The same, at once. */
static inline void foresee(const float *p, size_t n) {
    for (size_t i = 0; i < n; i += 16) (void)*(const volatile float *)(p + i);
}

/* Two rows of the result. While they are made, what the next two need comes near, unless they are the last. */
static void pair(const wide *g, size_t cols, int first, int last) {
    enum { ONE = STEP * VL, WIDE = VECTORS * ONE };
    const size_t in = 2 * g->cin * g->xs, out = 2 * g->cout * g->xs;
    if (first) {
        foresee(g->x, 2 * in);
        foresee(g->y, out);
    }
    ahead x_next = {g->x + 2 * in, g->x + (last ? 2 : 3) * in};
    ahead y_next = {g->y + out, g->y + (last ? 1 : 2) * out};
    const size_t times = (cols + WIDE - 1) / WIDE * (g->cout / SOME) * POINTS;
    const size_t x_lines = (in / 16 + times) / times, y_lines = (out / 16 + times) / times;
    for (size_t at = 0; at < cols;) {
        const int n = at + ONE < cols && g->xs >= WIDE ? VECTORS : 1;
        /* The last vectors reach back into those before, rather than beyond the row. */
        const size_t begin = at + (size_t)n * ONE <= g->xs ? at : g->xs - (size_t)n * ONE;
        transform_input(g, begin, n);
        for (size_t o = 0; o < g->cout; o += SOME) {
            float m[POINTS * SOME * VECTORS * VL];
            for (size_t p = 0; p < POINTS; p++) {
                const float *u = g->u + (o * POINTS + p * SOME) * g->cin, *v = g->v + p * point(g->cin);
                ask(&x_next, x_lines);
                ask(&y_next, y_lines);
                if (n == 1) products_1(u, v, g->cin, m + p * SOME * VECTORS * VL);
                else products_2(u, v, g->cin, m + p * SOME * VECTORS * VL);
            }
            for (size_t i = 0; i < SOME; i++)
                for (int j = 0; j < n; j++)
                    transform_output(g, m + (i * VECTORS + (size_t)j) * VL, o + i, begin + (size_t)j * ONE);
        }
        at += (size_t)n * ONE;
    }
}

/* G w G^T of an input channel and SOME outputs. w: a tap every `cout` floats; u: a point every `each`. */
static void transform_weights(const float *w, size_t cout, float *u, size_t each) {
    float rows[HIGH][3][SOME];
    for (size_t b = 0; b < 3; b++)
        for (size_t o = 0; o < SOME; o++) {
            const float k0 = w[b * cout + o], k1 = w[(3 + b) * cout + o], k2 = w[(6 + b) * cout + o];
            rows[0][b][o] = k0;
            rows[1][b][o] = 0.5f * (k0 + k1 + k2);
            rows[2][b][o] = 0.5f * (k0 - k1 + k2);
            rows[3][b][o] = k2;
        }
    for (size_t a = 0; a < HIGH; a++, u += ACROSS * each)
        for (size_t o = 0; o < SOME; o++) {
            const float k0 = rows[a][0][o], k1 = rows[a][1][o], k2 = rows[a][2][o];
            const float s = (k0 + k2) / 6, t = k1 / 6, p = k0 / 24 + k2 / 6, q = k1 / 12;
            u[o] = k0 / 4;
            u[each + o] = -s - t;
            u[2 * each + o] = t - s;
            u[3 * each + o] = p + q;
            u[4 * each + o] = p - q;
            u[5 * each + o] = k2;
        }
}

PVR_OP(conv3x3_winograd) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const size_t cin = k[0], cout = k[1], rows = k[2], cols = k[3], xs = k[4], x_tile = k[5], y_tile = k[6];
    const size_t u_size = POINTS * cin * cout, v_size = POINTS * point(cin);
    const float *w = call->buf[2];
    float *u = pvr_scratch(team, sizeof(float) * (u_size + (size_t)team->n * v_size));
    if (!u)
        return;
    size_t begin, end;
    pvr_split(team, cin, &begin, &end);
    for (size_t c = begin; c < end; c++)
        for (size_t o = 0; o < cout; o += SOME)
            transform_weights(w + c * 9 * cout + o, cout, u + o * POINTS * cin + c * SOME, cin * SOME);
    pvr_barrier(team);
    pvr_split(team, (size_t)p[PVR_N_TILES] * (rows / 2), &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t tile = i / (rows / 2), row = i % (rows / 2) * 2;
        const wide g = {
            .x = (const float *)call->buf[1] + tile * x_tile + row * cin * xs,
            .w = w, .u = u, .v = u + u_size + (size_t)team->tid * v_size,
            .y = (float *)call->buf[3] + tile * y_tile + row * cout * xs,
            .cin = cin, .cout = cout, .xs = xs,
        };
        pair(&g, cols, i == begin, i + 1 == end);
    }
}
