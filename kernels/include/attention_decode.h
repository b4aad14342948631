/* SPDX-License-Identifier: Apache-2.0 */
/* One token's attention. Units of a KV head and 64 positions are shared out over the team: each has its own softmax and
 * sums for all query heads of the KV head, which are joined afterwards (flash decoding). The cut
 * does not depend on the size of the team, nor does the result. */
#ifndef PVR_ATTENTION_DECODE_H
#define PVR_ATTENTION_DECODE_H

#include <math.h>

#include "attention.h"

enum { POSITIONS = 64, TOGETHER = 4, MAX_DIM = 256 };

/* What a unit leaves for a query head: the greatest score, the sum of weights, the weighted sum of
 * V. */
static size_t record_floats(size_t dim) { return (dim + 2 + 15) & ~(size_t)15; }

/* n positions of a KV head, rows of the caches from `row` on, and what becomes of a score. `next` is the
 * row of the next span. */
typedef struct span {
    kv_cache k, v;
    size_t row, n, next;
    float scale, cap;
} span;

/* Asks for `n` of a cache's elements from `at` on. A span is too short for the CPU's own prefetching: while keys
 * are multiplied their values are fetched, and meanwhile the keys of the next. */
PVR_INLINE void ahead(enum pvr_format fmt, const kv_cache *c, size_t at, size_t n) {
    const size_t size = fmt == PVR_F16 ? sizeof *c->halves : sizeof *c->bytes;
    const uintptr_t begin = (uintptr_t)c->bytes + at * size;
    for (size_t i = 0; i < n * size; i += 64)
        __builtin_prefetch((const void *)(begin + i));
}

/* Scores of a span for `together` heads; q is padded to whole vectors and scaled. */
PVR_INLINE void scores(const span *s, const float *q, enum pvr_format fmt, size_t together,
                       float (*out)[POSITIONS]) {
    const size_t vectors = (s->k.dim + LANES - 1) / LANES;
    for (size_t p = 0; p < s->n; p++) {
        vf sums[TOGETHER];
        for (size_t h = 0; h < together; h++)
            sums[h] = vf_set1(0);
        ahead(fmt, &s->v, (s->row + p) * s->v.dim, s->v.dim);
        for (size_t i = 0; i < vectors; i++) {
            vf key = kv_load(fmt, &s->k, s->row + p, i * LANES);
#pragma GCC unroll 4
            for (size_t h = 0; h < together; h++)
                sums[h] = vf_fma(key, vf_load(q + h * MAX_DIM + i * LANES), sums[h]);
        }
#pragma GCC unroll 4
        for (size_t h = 0; h < together; h++)
            out[h][p] = vf_sum(sums[h]);
    }
}

PVR_INLINE void values(const span *s, float (*weights)[POSITIONS], enum pvr_format fmt,
                       size_t together, float *out, size_t stride) {
    const size_t dim = s->v.dim;
    for (size_t i = 0; i < dim; i += LANES) {
        vf sums[TOGETHER];
        for (size_t h = 0; h < together; h++)
            sums[h] = vf_set1(0);
        for (size_t p = 0; p < s->n; p++) {
            if (p % 2 == 0) /* so in the end all of them, a line each time */
                ahead(fmt, &s->k, s->next * dim + i * s->n + p * LANES, 2 * LANES);
            vf value = kv_load(fmt, &s->v, s->row + p, i);
#pragma GCC unroll 4
            for (size_t h = 0; h < together; h++)
                sums[h] = vf_fma(value, vf_set1(weights[h][p]), sums[h]);
        }
#pragma GCC unroll 4
        for (size_t h = 0; h < together; h++)
            vf_store_n(out + h * stride + i, sums[h], dim - i);
    }
}

PVR_INLINE void unit(const span *s, const float *q, enum pvr_format fmt, size_t together,
                     float *record, size_t stride) {
    const size_t dim = s->k.dim, n = s->n;
    float padded[TOGETHER * MAX_DIM], weights[TOGETHER][POSITIONS] = {{0}};
    for (size_t h = 0; h < together; h++)
        for (size_t d = 0; d < MAX_DIM; d++)
            padded[h * MAX_DIM + d] = d < dim ? q[h * dim + d] * s->scale : 0;
    scores(s, padded, fmt, together, weights);
    for (size_t h = 0; h < together; h++) {
        if (s->cap > 0)
            attention_cap(weights[h], POSITIONS, s->cap);
        for (size_t p = n; p < POSITIONS; p++)
            weights[h][p] = -3e38f;
        vf most = vf_load(weights[h]), sum = vf_set1(0);
        for (size_t p = LANES; p < POSITIONS; p += LANES)
            most = vf_max(most, vf_load(weights[h] + p));
        record[h * stride] = vf_most(most);
        most = vf_set1(record[h * stride]);
        for (size_t p = 0; p < POSITIONS; p += LANES) {
            vf weight = vf_exp(vf_sub(vf_load(weights[h] + p), most));
            vf_store(weights[h] + p, weight);
            sum = vf_add(sum, weight);
        }
        record[h * stride + 1] = vf_sum(sum);
    }
    values(s, weights, fmt, together, record + 2, stride);
}

/* The next of `left` heads, a few together; how many they are the compiler has to know. */
PVR_INLINE void units(const span *s, const float *q, enum pvr_format fmt, size_t left,
                      float *record, size_t stride) {
    switch (left) {
    case 1: unit(s, q, fmt, 1, record, stride); break;
    case 2: unit(s, q, fmt, 2, record, stride); break;
    case 3: unit(s, q, fmt, 3, record, stride); break;
    default: unit(s, q, fmt, 4, record, stride); break;
    }
}

static void join(const float *record, size_t chunks, size_t dim, float *out) {
    const size_t stride = record_floats(dim);
    float most = record[0], total = 0;
    for (size_t c = 1; c < chunks; c++)
        most = record[c * stride] > most ? record[c * stride] : most;
    for (size_t d = 0; d < dim; d++)
        out[d] = 0;
    for (size_t c = 0; c < chunks; c++, record += stride) {
        const float weight = expf(record[0] - most);
        total += weight * record[1];
        for (size_t d = 0; d < dim; d++)
            out[d] += weight * record[2 + d];
    }
    for (size_t d = 0; d < dim; d++)
        out[d] /= total;
}

/* `out` may be where q is. */
static inline void attention_one(const pvr_call *call, pvr_team *team, const float *q, void *keys,
                                 void *vectors, float *out) {
    const size_t heads = call->push[HEADS], kv_heads = call->push[KV_HEADS],
                 dim = call->push[DIM], ctx = call->push[CTX];
    const float scale = pvr_push_f32(call, SCALE), cap = pvr_push_f32(call, SOFTCAP);
    const size_t limit = (size_t)((const uint32_t *)call->buf[0])[PVR_POS0] + 1;
    const size_t first = attention_begin(call, limit), positions = limit - first;
    const size_t chunks = (positions + POSITIONS - 1) / POSITIONS, each = heads / kv_heads;
    const size_t stride = record_floats(dim);

    float *records =
        pvr_scratch(team, heads * chunks * stride * sizeof(float)); /* [heads][chunks] */
    if (!records)
        return;
    size_t begin, end;
    pvr_split(team, kv_heads * chunks, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t kv = i / chunks, chunk = i % chunks, from = first + chunk * POSITIONS;
        const span s = {
            .k = kv_open(keys, kv_heads * ctx, dim),
            .v = kv_open(vectors, kv_heads * ctx, dim),
            .row = kv * ctx + from,
            .n = limit - from < POSITIONS ? limit - from : POSITIONS,
            .next = chunk + 1 < chunks ? kv * ctx + from + POSITIONS : (kv + 1) * ctx + first,
            .scale = scale,
            .cap = cap,
        };
        for (size_t h = 0; h < each; h += TOGETHER) {
            const size_t head = kv * each + h;
            float *record = records + (head * chunks + chunk) * stride;
            if (call->push[FORMAT] == PVR_Q8)
                units(&s, q + head * dim, PVR_Q8, each - h, record, chunks * stride);
            else
                units(&s, q + head * dim, PVR_F16, each - h, record, chunks * stride);
        }
    }
    pvr_barrier(team);
    pvr_split(team, heads, &begin, &end);
    for (size_t head = begin; head < end; head++)
        join(records + head * chunks * stride, chunks, dim, out + head * dim);
}

#endif
