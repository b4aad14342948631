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

/* Tiles of 16 rows, shared out over the team in one run each. Every thread rounds all of x for
 * itself, into `quants`: that is a microsecond, no more than a barrier would be. */
static inline void matvec_multiply(const pvr_call *call, const pvr_team *team, const uint32_t *w,
                                   const float *x, uint8_t *quants, float *y) {
    const uint32_t fmt = call->push[0], accumulate = call->push[3];
    const size_t n = call->push[1], k = call->push[2], blocks = k / WEIGHTS_BLOCK;
    y += call->push[4];
    if (fmt != PVR_F16)
        for (size_t b = 0; b < blocks; b++)
            weights_quantise(x + b * WEIGHTS_BLOCK, quants + b * 44, 0, 1);

    const size_t tile_words = blocks * weights_block_words(fmt);
    size_t begin, end;
    pvr_split(team, (n + LANES - 1) / LANES, &begin, &end);
    for (size_t tile = begin; tile < end; tile++) {
        const uint32_t *at = w + tile * tile_words;
        size_t rows = n - tile * LANES;
        vf sum;
        if (fmt == PVR_Q4) {
            weights_tile_q4(at, blocks, quants, 1, &sum);
        } else if (fmt == PVR_Q8) {
            weights_tile_q8(at, blocks, quants, 1, &sum);
        } else {
            /* Four sums side by side: a single one would wait for itself. */
            const size_t quarter = k / 4;
            const uint16_t *h = (const uint16_t *)at;
            vf s[4] = {vf_set1(0), vf_set1(0), vf_set1(0), vf_set1(0)};
            for (size_t i = 0; i < quarter; i++, h += LANES * 4)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    s[j] = vf_fma(vf_half(h + j * LANES), vf_set1(x[4 * i + (size_t)j]), s[j]);
            sum = vf_add(vf_add(s[0], s[1]), vf_add(s[2], s[3]));
        }
        weights_store(y + tile * LANES, sum, rows < LANES ? rows : LANES, accumulate);
    }
}

#endif
