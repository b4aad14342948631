/* SPDX-License-Identifier: Apache-2.0 */
/* 3x3 of many channels: Winograd's F(4x4, 3x3) with the matrices of Lavin and Gray (2015), batches of tiles
 * between whose transforms 36 products of matrices are made; all else: the sum itself. Lanes are output
 * channels (in the transform of the input, input channels), a pixel's channel is broadcast. Weights are
 * unpacked, for Winograd's also transformed, at the start of each call: that is little beside a map, and
 * the model stays as small as its file. */
#include "maps.h"

/* Registers hold sums for so many blocks of output channels and pixels (or tiles). */
#if defined(PVR_AVX512)
enum { BLOCKS = 4, PIXELS = 6 };
#elif defined(__AVX2__) || defined(__aarch64__)
enum { BLOCKS = 1, PIXELS = 6 };
#else
enum { BLOCKS = 1, PIXELS = 2 };
#endif
enum {
    EDGE = 6, POINTS = EDGE * EDGE, OUT = 4, /* of a Winograd tile */
    BATCH_BYTES = 640 << 10,                 /* of a thread's transformed tiles: they stay in the second cache */
    BATCH_TILES = 8 * PIXELS,
};

typedef struct {
    const float *x, *r;
    const void *w_data; /* packed */
    float *front;       /* bias and slope of all lanes of all blocks, in the scratch */
    float *y;
    size_t cin, cout, blocks, k, xl, yl, w, h, xs, ps;
    uint32_t act, residual, fmt;
} conv;

/* Output channels that have weights, and those of block b. */
PVR_INLINE size_t weighted(const conv *g) { return (g->cout + 7) / 8 * 8; }
PVR_INLINE size_t lanes_of(const conv *g, size_t b) {
    const size_t left = weighted(g) - b * LANES;
    return left < LANES ? left : LANES;
}

/* sum[t][b] += v[t] * u[b] over n channels; u is [b][channel][16], `apart` floats from block to block. */
PVR_INLINE void add_products(int nb, vf sum[PIXELS][BLOCKS], const float *u, size_t apart, const float *v,
                             size_t step, size_t n) {
    for (size_t c = 0; c < n; c++) {
        vf row[BLOCKS];
#pragma GCC unroll 8
        for (int b = 0; b < nb; b++) row[b] = vf_load(u + (size_t)b * apart + c * LANES);
#pragma GCC unroll 8
        for (int t = 0; t < PIXELS; t++) {
            const vf s = vf_set1(v[(size_t)t * step + c]);
#pragma GCC unroll 8
            for (int b = 0; b < nb; b++) sum[t][b] = vf_fma(s, row[b], sum[t][b]);
        }
    }
}

/* Where a sum of block b at pixel `at` goes, after bias, activation and residual. */
PVR_INLINE void finish(const conv *g, vf sum, size_t b, size_t at) {
    const float *front = g->front + 2 * b * LANES;
    float *to = g->y + (b * g->ps + at) * g->yl;
    const float *from = g->r + (b * g->ps + at) * g->yl;
    const vf r = g->residual ? vf_load_n(from, g->yl) : vf_set1(0.0f);
    vf v = maps_activated(g->act, vf_add(sum, vf_load(front)), vf_load(front + LANES), r);
    if (g->residual && g->act != MAPS_GATE)
        v = vf_add(v, r);
    vf_store_n(to, v, g->yl);
}

/* Bias and slope into the scratch. */
static void unpack_front(const conv *g, size_t b) {
    const float *bias = (const float *)g->w_data + b * LANES;
    vf_store(g->front + 2 * b * LANES, vf_load_n(bias, lanes_of(g, b)));
    vf_store(g->front + (2 * b + 1) * LANES, vf_load_n(bias + weighted(g), lanes_of(g, b)));
}

/* Sixteen weights of a tap and input channel: block b's. */
PVR_INLINE vf weights_at(const conv *g, size_t b, size_t tap, size_t c) {
    const size_t n = weighted(g), lanes = lanes_of(g, b);
    const size_t i = b * LANES * g->k * g->k * g->cin + (tap * g->cin + c) * lanes;
    const uint16_t *halves = (const uint16_t *)((const float *)g->w_data + 2 * n);
    if (c >= g->cin)
        return vf_set1(0.0f);
    if (g->fmt == PVR_F16)
        return vf_half_n(halves + i, lanes);
    const int8_t *body = (const int8_t *)(halves + n * g->cin / 4);
    float q[LANES] = {0};
    for (size_t l = 0; l < lanes; l++) q[l] = body[i + l];
    return vf_mul(vf_load(q), vf_half_n(halves + b * LANES * g->cin / 4 + c / 4 * lanes, lanes));
}

/* Input channels in whole blocks. */
PVR_INLINE size_t whole(size_t cin) { return (cin + LANES - 1) / LANES * LANES; }

/* -- the sum itself */

#define DIRECT(NB)                                                                                           \
    static void direct_##NB(const conv *g, const float *u, size_t b, size_t row) {                            \
        const size_t taps = g->k * g->k, reach = g->k / 2;                                                    \
        const size_t apart = taps * g->cin * LANES;                                                           \
        u += b * apart;                                                                                       \
        for (size_t x = 0; x < g->w; x += PIXELS) {                                                           \
            vf sum[PIXELS][BLOCKS];                                                                           \
            for (int t = 0; t < PIXELS; t++)                                                                  \
                for (int i = 0; i < NB; i++) sum[t][i] = vf_set1(0.0f);                                       \
            const float *corner = g->x - (reach * (g->xs + 1)) * g->xl;                                       \
            for (size_t tap = 0; tap < taps; tap++) {                                                         \
                const size_t at = (row + tap / g->k) * g->xs + x + tap % g->k;                                \
                for (size_t c = 0; c < g->cin; c += g->xl)                                                    \
                    add_products(NB, sum, u + (tap * g->cin + c) * LANES, apart,                              \
                                 corner + (c / g->xl * g->ps + at) * g->xl, g->xl,                            \
                                 g->cin - c < g->xl ? g->cin - c : g->xl);                                    \
            }                                                                                                 \
            for (size_t t = 0; t < PIXELS && x + t < g->w; t++)                                               \
                for (size_t i = 0; i < NB; i++) finish(g, sum[t][i], b + i, row * g->xs + x + t);             \
        }                                                                                                     \
    }

/* -- Winograd's way */

/* Six sums of six for each of B^T d B's two sides. */
PVR_INLINE void input_side(const vf d[EDGE], vf out[EDGE]) {
    const vf two = vf_set1(2.0f), four = vf_set1(4.0f), five = vf_set1(-5.0f), minus = vf_set1(-4.0f);
    const vf a = vf_fma(minus, d[2], d[4]), b = vf_fma(minus, d[1], d[3]);
    const vf c = vf_sub(d[4], d[2]), e = vf_mul(two, vf_sub(d[3], d[1]));
    out[0] = vf_fma(four, d[0], vf_fma(five, d[2], d[4]));
    out[1] = vf_add(a, b);
    out[2] = vf_sub(a, b);
    out[3] = vf_add(c, e);
    out[4] = vf_sub(c, e);
    out[5] = vf_fma(four, d[1], vf_fma(five, d[3], d[5]));
}

/* Four sums of six for each of A^T m A's two sides. */
PVR_INLINE void output_side(const vf m[EDGE], vf out[OUT]) {
    const vf a = vf_add(m[1], m[2]), b = vf_sub(m[1], m[2]), c = vf_add(m[3], m[4]), d = vf_sub(m[3], m[4]);
    out[0] = vf_add(m[0], vf_add(a, c));
    out[1] = vf_fma(vf_set1(2.0f), d, b);
    out[2] = vf_fma(vf_set1(4.0f), c, a);
    out[3] = vf_add(vf_fma(vf_set1(8.0f), d, b), m[5]);
}

/* Six sums of three for each of G w G^T's two sides. */
PVR_INLINE void weight_side(const vf w[3], vf out[EDGE]) {
    const vf sixth = vf_set1(1.0f / 6), part = vf_set1(1.0f / 24);
    const vf a = vf_mul(vf_set1(-1.0f / 6), vf_add(w[0], w[2]));
    const vf b = vf_fma(sixth, w[2], vf_mul(part, w[0])), c = vf_mul(vf_set1(1.0f / 12), w[1]);
    out[0] = vf_mul(vf_set1(0.25f), w[0]);
    out[1] = vf_sub(a, vf_mul(sixth, w[1]));
    out[2] = vf_fma(sixth, w[1], a);
    out[3] = vf_add(b, c);
    out[4] = vf_sub(b, c);
    out[5] = w[2];
}

/* u: [point][block][cin][16]. */
static void transform_weights(const conv *g, float *u, size_t b, size_t c) {
    vf half[3][EDGE], line[3];
    for (size_t j = 0; j < 3; j++) { /* columns */
        for (size_t i = 0; i < 3; i++) line[i] = weights_at(g, b, 3 * i + j, c);
        weight_side(line, half[j]);
    }
    for (size_t i = 0; i < EDGE; i++) {
        vf out[EDGE];
        for (int j = 0; j < 3; j++) line[j] = half[j][i];
        weight_side(line, out);
        for (size_t j = 0; j < EDGE; j++)
            vf_store(u + (((EDGE * i + j) * g->blocks + b) * whole(g->cin) + c) * LANES, out[j]);
    }
}

/* v: [point][tile][cin]; d: the tile's corner. */
static void transform_input(const conv *g, const float *d, float *v, size_t apart) {
    for (size_t c = 0; c < g->cin; c += LANES, d += g->ps * LANES) {
        vf half[EDGE][EDGE];
#pragma GCC unroll 1
        for (size_t j = 0; j < EDGE; j++) {
            vf line[EDGE];
            for (size_t i = 0; i < EDGE; i++) line[i] = vf_load(d + (i * g->xs + j) * LANES);
            vf out[EDGE];
            input_side(line, out);
            for (size_t i = 0; i < EDGE; i++) half[i][j] = out[i];
        }
#pragma GCC unroll 1
        for (size_t i = 0; i < EDGE; i++) {
            vf out[EDGE];
            input_side(half[i], out);
            for (size_t j = 0; j < EDGE; j++) vf_store(v + (EDGE * i + j) * apart + c, out[j]);
        }
    }
}

/* m: [point][tile][block][16]. */
static void transform_output(const conv *g, const float *m, size_t apart, size_t tile_x, size_t tile_y) {
    const size_t x = OUT * tile_x, y = OUT * tile_y;
    for (size_t b = 0; b < g->blocks; b++) {
        vf half[OUT][EDGE];
#pragma GCC unroll 1
        for (size_t j = 0; j < EDGE; j++) {
            vf line[EDGE], out[OUT];
            for (size_t i = 0; i < EDGE; i++) line[i] = vf_load(m + (EDGE * i + j) * apart + b * LANES);
            output_side(line, out);
            for (size_t i = 0; i < OUT; i++) half[i][j] = out[i];
        }
        for (size_t i = 0; i < OUT && y + i < g->h; i++) {
            vf out[OUT];
            output_side(half[i], out);
            for (size_t j = 0; j < OUT && x + j < g->w; j++) finish(g, out[j], b, (y + i) * g->xs + x + j);
        }
    }
}

/* The products of a point: m[tile][block] = sum over c of v[tile][c] * u[block][c]. */
#define PRODUCTS(NB)                                                                                         \
    static void products_##NB(const conv *g, const float *u, const float *v, float *m, size_t tiles) {        \
        const size_t n = whole(g->cin);                                                                       \
        for (size_t t = 0; t < tiles; t += PIXELS) {                                                          \
            vf sum[PIXELS][BLOCKS];                                                                           \
            for (int i = 0; i < PIXELS; i++)                                                                  \
                for (int j = 0; j < NB; j++) sum[i][j] = vf_set1(0.0f);                                       \
            add_products(NB, sum, u, n * LANES, v + t * n, n, n);                                             \
            for (int i = 0; i < PIXELS; i++)                                                                  \
                for (int j = 0; j < NB; j++)                                                                  \
                    vf_store(m + ((t + (size_t)i) * g->blocks + (size_t)j) * LANES, sum[i][j]);               \
        }                                                                                                     \
    }

typedef void direct_fn(const conv *, const float *, size_t, size_t);
typedef void products_fn(const conv *, const float *, const float *, float *, size_t);
DIRECT(1)
PRODUCTS(1)
#if defined(PVR_AVX512)
DIRECT(2)
DIRECT(3)
DIRECT(4)
PRODUCTS(2)
PRODUCTS(3)
PRODUCTS(4)
static direct_fn *const directs[] = {direct_1, direct_2, direct_3, direct_4};
static products_fn *const products[] = {products_1, products_2, products_3, products_4};
#else
static direct_fn *const directs[] = {direct_1};
static products_fn *const products[] = {products_1};
#endif

/* Blocks that are done at once of those from b on. */
PVR_INLINE size_t blocks_at(const conv *g, size_t b) {
    return g->blocks - b < BLOCKS ? g->blocks - b : BLOCKS;
}

static void winograd(conv *g, pvr_team *team) {
    const size_t across = (g->w + OUT - 1) / OUT, tiles = across * ((g->h + OUT - 1) / OUT);
    const size_t n = g->blocks * LANES, cin = whole(g->cin);
    size_t batch = BATCH_BYTES / (POINTS * sizeof(float) * (cin + n)) / PIXELS * PIXELS;
    batch = batch < PIXELS ? PIXELS : batch > BATCH_TILES ? BATCH_TILES : batch;
    const size_t u_size = POINTS * cin * n, v_size = POINTS * batch * cin, m_size = POINTS * batch * n;
    g->front = pvr_scratch(team, sizeof(float) * (2 * n + u_size + (size_t)team->n * (v_size + m_size)));
    if (!g->front)
        return;
    float *u = g->front + 2 * n, *v = u + u_size + (size_t)team->tid * (v_size + m_size), *m = v + v_size;
    size_t begin, end;
    pvr_split(team, g->blocks * cin, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        transform_weights(g, u, i / cin, i % cin);
        if (i % cin == 0)
            unpack_front(g, i / cin);
    }
    pvr_barrier(team);

    memset(v, 0, v_size * sizeof(float)); /* tiles that fill up the last batch are computed, too */
    pvr_split(team, (tiles + batch - 1) / batch, &begin, &end);
    for (size_t first = begin * batch; first < end * batch && first < tiles; first += batch) {
        const size_t count = tiles - first < batch ? tiles - first : batch;
        for (size_t t = 0; t < count; t++) {
            const size_t ty = (first + t) / across, tx = (first + t) % across;
            const float *corner = g->x + (OUT * (ty * g->xs + tx)) * LANES - (g->xs + 1) * LANES;
            transform_input(g, corner, v + t * cin, batch * cin);
        }
        for (size_t p = 0; p < POINTS; p++)
            for (size_t b = 0; b < g->blocks; b += BLOCKS)
                products[blocks_at(g, b) - 1](g, u + (p * g->blocks + b) * cin * LANES, v + p * batch * cin,
                                              m + p * batch * n + b * LANES, count);
        for (size_t t = 0; t < count; t++)
            transform_output(g, m + t * n, batch * n, (first + t) % across, (first + t) / across);
    }
}

static void direct(conv *g, pvr_team *team) {
    const size_t taps = g->k * g->k, each = taps * g->cin, n = g->blocks * LANES;
    g->front = pvr_scratch(team, sizeof(float) * (2 * n + n * each));
    if (!g->front)
        return;
    float *u = g->front + 2 * n;
    size_t begin, end;
    pvr_split(team, g->blocks * each, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        vf_store(u + i * LANES, weights_at(g, i / each, i % each / g->cin, i % g->cin));
        if (i % each == 0)
            unpack_front(g, i / each);
    }
    pvr_barrier(team);
    pvr_split(team, g->h, &begin, &end);
    for (size_t row = begin; row < end; row++)
        for (size_t b = 0; b < g->blocks; b += BLOCKS) directs[blocks_at(g, b) - 1](g, u, b, row);
}

PVR_OP(conv2d) {
    const uint32_t *k = call->push;
    const size_t xl = k[6], yl = k[7], origin = k[12];
    conv g = {
        .x = (const float *)call->buf[1] + origin * xl,
        .w_data = call->buf[2],
        .r = (const float *)call->buf[3] + origin * yl,
        .y = (float *)call->buf[4] + origin * yl,
        .cin = k[1], .cout = k[2], .blocks = (k[2] + LANES - 1) / LANES, .k = k[3], .xl = xl, .yl = yl,
        .w = k[8], .h = k[9], .xs = k[10], .ps = k[11],
        .act = k[4], .residual = k[5], .fmt = k[0],
    };
    if (g.k == 3 && g.xl == LANES) winograd(&g, team);
    else direct(&g, team);
}
