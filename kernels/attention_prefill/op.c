/* SPDX-License-Identifier: Apache-2.0 */
/* Units of up to 16 tokens of up to 4 query heads of a KV head are dealt out to the team. A unit
 * goes over the positions in blocks of 32: K transposed and V as float32 in scratch, then scores
 * and weighted sums as small matrix products of 4 rows (a row: a head of a token) that stay in
 * registers; the softmax is kept up as the blocks come. */
#include <math.h>

#include "attention.h"

enum {
    POSITIONS = 2 * LANES,
    TOKENS = 16,
    TOGETHER = 4,
    ROWS = TOKENS * TOGETHER,
    AT_ONCE = 4, /* rows */
#if defined(PVR_AVX512)
    WIDE = 2, /* vectors */
#else
    WIDE = 1,
#endif
};

/* A thread's part of the scratch; `pad` is dim rounded up to whole steps of WIDE vectors. */
typedef struct work {
    float *keys;    /* [dim][POSITIONS] */
    float *values;  /* [POSITIONS][pad] */
    float *q;       /* [ROWS][dim], scaled */
    float *sums;    /* [ROWS][pad] */
    float *weights; /* [ROWS][POSITIONS], scores at first */
    float most[ROWS], total[ROWS];
} work;

static size_t work_floats(size_t dim, size_t pad) {
    return POSITIONS * (dim + pad + ROWS) + ROWS * (dim + pad);
}

/* out[r][j] = (add ? out[r][j] : 0) + sum over i < n of a[r][i] b[i][j], for AT_ONCE rows r and
 * j < cols. */
PVR_INLINE void product(const float *a, size_t lda, const float *b, size_t ldb, size_t n,
                        size_t cols, float *out, size_t ldo, int add) {
    for (size_t j = 0; j < cols; j += LANES * WIDE) {
        vf s[AT_ONCE][WIDE];
#pragma GCC unroll 4
        for (int r = 0; r < AT_ONCE; r++)
#pragma GCC unroll 2
            for (int v = 0; v < WIDE; v++)
                s[r][v] = add ? vf_load(out + (size_t)r * ldo + j + (size_t)v * LANES) : vf_set1(0);
        for (size_t i = 0; i < n; i++) {
            vf column[WIDE];
#pragma GCC unroll 2
            for (int v = 0; v < WIDE; v++)
                column[v] = vf_load(b + i * ldb + j + (size_t)v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < AT_ONCE; r++) {
                vf factor = vf_set1(a[(size_t)r * lda + i]);
#pragma GCC unroll 2
                for (int v = 0; v < WIDE; v++)
                    s[r][v] = vf_fma(column[v], factor, s[r][v]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < AT_ONCE; r++)
#pragma GCC unroll 2
            for (int v = 0; v < WIDE; v++)
                vf_store(out + (size_t)r * ldo + j + (size_t)v * LANES, s[r][v]);
    }
}

/* Scores of a row's positions begin..end-1 of the block become weights, those of the others 0. */
static void soften(work *w, size_t row, size_t begin, size_t end, float cap, size_t pad) {
    float *score = w->weights + row * POSITIONS;
    if (begin >= end) {
        memset(score, 0, POSITIONS * sizeof *score);
        return;
    }
    if (cap > 0)
        attention_cap(score, POSITIONS, cap);
    for (size_t i = 0; i < begin; i++)
        score[i] = -3e38f;
    for (size_t i = end; i < POSITIONS; i++)
        score[i] = -3e38f;
    vf a = vf_load(score), b = vf_load(score + LANES);
    float most = vf_most(vf_max(a, b));
    most = most > w->most[row] ? most : w->most[row];
    a = vf_exp(vf_sub(a, vf_set1(most)));
    b = vf_exp(vf_sub(b, vf_set1(most)));
    vf_store(score, a);
    vf_store(score + LANES, b);
    if (most > w->most[row]) {
        const float shrink = expf(w->most[row] - most);
        float *sums = w->sums + row * pad;
        for (size_t d = 0; d < pad; d++)
            sums[d] *= shrink;
        w->total[row] *= shrink;
        w->most[row] = most;
    }
    w->total[row] += vf_sum(vf_add(a, b));
}

PVR_INLINE void load_block(work *w, const kv_cache *k, const kv_cache *v, enum pvr_format fmt,
                           size_t first, size_t n, size_t pad) {
    const size_t dim = k->dim;
    float row[LANES];
    if (n < POSITIONS) {
        memset(w->keys, 0, dim * POSITIONS * sizeof(float));
        memset(w->values, 0, POSITIONS * pad * sizeof(float));
    }
    for (size_t p = 0; p < n; p++)
        for (size_t d = 0; d < dim; d += LANES) {
            const size_t count = dim - d < LANES ? dim - d : LANES;
            vf_store(row, kv_load(fmt, k, first + p, d));
            for (size_t i = 0; i < count; i++)
                w->keys[(d + i) * POSITIONS + p] = row[i];
            vf_store(w->values + p * pad + d, kv_load(fmt, v, first + p, d));
        }
}

PVR_OP(attention_prefill) {
    const uint32_t *params = call->buf[0];
    const size_t heads = call->push[HEADS], kv_heads = call->push[KV_HEADS],
                 dim = call->push[DIM], ctx = call->push[CTX];
    const float scale = pvr_push_f32(call, SCALE), cap = pvr_push_f32(call, SOFTCAP);
    const size_t tokens = params[PVR_N_TOKENS], pos0 = params[PVR_POS0];
    const size_t each = heads / kv_heads, width = heads + 2 * kv_heads;
    const size_t pad = (dim + LANES * WIDE - 1) / (LANES * WIDE) * (LANES * WIDE);
    const size_t head_groups = (each + TOGETHER - 1) / TOGETHER;
    const size_t token_groups = (tokens + TOKENS - 1) / TOKENS;
    const kv_cache keys = kv_open(call->buf[2], kv_heads * ctx, dim),
                   values = kv_open(call->buf[3], kv_heads * ctx, dim);
    const float *qkv = call->buf[1];
    float *out = call->buf[4];

    const size_t floats = (work_floats(dim, pad) + 15) & ~(size_t)15;
    float *scratch = pvr_scratch(team, floats * (size_t)team->n * sizeof(float));
    if (!scratch)
        return;
    work w;
    w.keys = scratch + floats * (size_t)team->tid;
    w.values = w.keys + dim * POSITIONS;
    w.q = w.values + POSITIONS * pad;
    w.sums = w.q + ROWS * dim;
    w.weights = w.sums + ROWS * pad;
    /* What lies between dim and pad stays 0. */
    memset(w.values, 0, POSITIONS * pad * sizeof(float));

    const size_t units = kv_heads * head_groups * token_groups;
    for (size_t u = (size_t)team->tid; u < units; u += (size_t)team->n) {
        const size_t first = u / (kv_heads * head_groups) * TOKENS;
        const size_t kv = u % (kv_heads * head_groups) / head_groups,
                     h0 = u % head_groups * TOGETHER;
        const size_t n_tokens = tokens - first < TOKENS ? tokens - first : TOKENS;
        const size_t n_heads = each - h0 < TOGETHER ? each - h0 : TOGETHER;
        const size_t head = kv * each + h0, rows = n_tokens * n_heads;
        const size_t all_rows = (rows + AT_ONCE - 1) / AT_ONCE * AT_ONCE;

        memset(w.q, 0, all_rows * dim * sizeof(float));
        memset(w.sums, 0, all_rows * pad * sizeof(float));
        for (size_t r = 0; r < rows; r++) {
            const float *q = qkv + ((first + r / n_heads) * width + head + r % n_heads) * dim;
            for (size_t d = 0; d < dim; d++)
                w.q[r * dim + d] = q[d] * scale;
        }
        for (size_t r = 0; r < all_rows; r++) {
            w.most[r] = -3e38f;
            w.total[r] = 0;
        }
        const size_t limit = pos0 + first + n_tokens; /* positions that the last token attends to */
        const size_t begin = attention_begin(call, pos0 + first + 1);
        for (size_t p0 = begin; p0 < limit; p0 += POSITIONS) {
            const size_t n = limit - p0 < POSITIONS ? limit - p0 : POSITIONS, row = kv * ctx + p0;
            if (call->push[FORMAT] == PVR_Q8)
                load_block(&w, &keys, &values, PVR_Q8, row, n, pad);
            else
                load_block(&w, &keys, &values, PVR_F16, row, n, pad);
            for (size_t r = 0; r < all_rows; r += AT_ONCE)
                product(w.q + r * dim, dim, w.keys, POSITIONS, dim, POSITIONS,
                        w.weights + r * POSITIONS, POSITIONS, 0);
            for (size_t r = 0; r < all_rows; r++) {
                const size_t end = pos0 + first + r / n_heads + 1, from = attention_begin(call, end);
                const size_t last = r >= rows || end <= p0 ? 0 : end - p0 < n ? end - p0 : n;
                soften(&w, r, from > p0 ? from - p0 : 0, last, cap, pad);
            }
            for (size_t r = 0; r < all_rows; r += AT_ONCE)
                product(w.weights + r * POSITIONS, POSITIONS, w.values, pad, n, pad,
                        w.sums + r * pad, pad, 1);
        }
        for (size_t r = 0; r < rows; r++) {
            float *o = out + ((first + r / n_heads) * heads + head + r % n_heads) * dim;
            for (size_t d = 0; d < dim; d++)
                o[d] = w.sums[r * pad + d] / w.total[r];
        }
    }
}
