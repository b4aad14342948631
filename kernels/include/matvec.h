/* SPDX-License-Identifier: Apache-2.0 */
/* A matrix times a vector, as matvec and what becomes one with it do it. Push constants begin with
 * fmt, n, k, accumulate, y0. */
#ifndef PVR_MATVEC_H
#define PVR_MATVEC_H

#include "weights.h"

/* Memory of this thread alone: `floats` and what matvec_multiply needs. NULL when there is none. */
static inline float *matvec_scratch(const pvr_call *call, pvr_team *team, size_t floats) {
    const size_t quants = call->push[0] == PVR_F16 ? 0 : weights_quants_nbytes(call->push[2], 1);
    const size_t nbytes = (floats * 4 + quants + 63) & ~(size_t)63;
    char *all = pvr_scratch(team, nbytes * (size_t)team->n);
    return all ? (float *)(all + nbytes * (size_t)team->tid) : NULL;
}

/* A vector of k elements: floats, and for q4 and q8 rounded into `quants`. */
typedef struct matvec_x {
    uint32_t fmt;
    size_t k;
    const float *x;
    const uint8_t *quants;
} matvec_x;

PVR_INLINE matvec_x matvec_open(const pvr_call *call, const float *x, uint8_t *quants) {
    const matvec_x v = {.fmt = call->push[0], .k = call->push[2], .x = x, .quants = quants};
    if (v.fmt != PVR_F16)
        for (size_t b = 0; b < v.k / WEIGHTS_BLOCK; b++)
            weights_quantise(x + b * WEIGHTS_BLOCK, quants + b * 44, 0, 1);
    return v;
}

/* The product of a tile of 16 rows. */
PVR_INLINE vf matvec_tile(const matvec_x *v, const uint32_t *w, size_t tile) {
    const size_t blocks = v->k / WEIGHTS_BLOCK;
    const uint32_t *at = w + tile * blocks * weights_block_words(v->fmt);
    vf sum;
    if (v->fmt == PVR_Q4) {
        weights_tile_q4(at, blocks, v->quants, 1, &sum);
    } else if (v->fmt == PVR_Q8) {
        weights_tile_q8(at, blocks, v->quants, 1, &sum);
    } else {
        /* Four sums side by side: a single one would wait for itself. */
        const size_t quarter = v->k / 4;
        const uint16_t *h = (const uint16_t *)at;
        vf s[4] = {vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0)};
        for (size_t i = 0; i < quarter; i++, h += LANES * 4)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                s[j] = vf_fma(vf_half(h + j * LANES), vf_set1(v->x[4 * i + (size_t)j]), s[j]);
        sum = vf_add(vf_add(s[0], s[1]), vf_add(s[2], s[3]));
    }
    return sum;
}

/* Writes a tile's rows, of which the last tile may have less than 16. */
PVR_INLINE void matvec_store(const pvr_call *call, float *y, size_t tile, vf sum) {
    const size_t rows = call->push[1] - tile * LANES;
    weights_store(y + tile * LANES, sum, rows < LANES ? rows : LANES, call->push[3]);
}

/* Tiles of 16 rows, shared out over the team in one run each. Every thread rounds all of x for
 * itself, into `quants`: that is a microsecond, no more than a barrier would be. */
static inline void matvec_multiply(const pvr_call *call, const pvr_team *team, const uint32_t *w,
                                   const float *x, uint8_t *quants, float *y) {
    const size_t n = call->push[1];
    const matvec_x vector = matvec_open(call, x, quants);
    y += call->push[4];
    size_t begin, end;
    pvr_split(team, (n + LANES - 1) / LANES, &begin, &end);
#if !defined(PVR_RVV)
    if (WEIGHTS_RUNS > 1 && vector.fmt != PVR_F16) {
        const size_t run = (end - begin) / WEIGHTS_RUNS, blocks = vector.k / WEIGHTS_BLOCK;
        const size_t words = blocks * weights_block_words(vector.fmt);
        for (size_t i = 0; i < run; i++, begin++) {
            const uint32_t *at[WEIGHTS_RUNS];
            vf sums[WEIGHTS_RUNS];
            for (size_t r = 0; r < WEIGHTS_RUNS; r++)
                at[r] = w + (begin + r * run) * words;
            if (vector.fmt == PVR_Q4)
                weights_tiles(PVR_Q4, at, blocks, quants, sums);
            else
                weights_tiles(PVR_Q8, at, blocks, quants, sums);
            for (size_t r = 0; r < WEIGHTS_RUNS; r++)
                matvec_store(call, y, begin + r * run, sums[r]);
        }
        begin += (WEIGHTS_RUNS - 1) * run; /* what is left over has fewer tiles than there are runs */
    }
#endif
    for (; begin < end; begin++)
        matvec_store(call, y, begin, matvec_tile(&vector, w, begin));
}

#endif
