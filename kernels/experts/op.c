/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of 16 rows are shared out over the team. For each tile the experts are taken one after the
 * other, each with all of its tokens: a tile's weights come from memory once. */
#include <string.h>

#include "weights.h"

PVR_INLINE vf product(uint32_t fmt, const uint32_t *tile, size_t k, const uint8_t *quants,
                      const float *x) {
    vf sum;
    if (fmt == PVR_Q4)
        weights_tile_q4(tile, k / WEIGHTS_BLOCK, quants, 1, &sum);
    else if (fmt == PVR_Q8)
        weights_tile_q8(tile, k / WEIGHTS_BLOCK, quants, 1, &sum);
    else
        weights_tile_f16(tile, k, &x, 1, &sum);
    return sum;
}

PVR_OP(experts) {
    const uint32_t fmt = call->push[0], first = call->push[3];
    const size_t n = call->push[1], k = call->push[2], count = call->push[4],
                 used = call->push[5], ldy = call->push[8], blocks = k / WEIGHTS_BLOCK;
    const int add = call->push[6] != 0;
    const size_t pairs = ((const uint32_t *)call->buf[0])[PVR_N_TOKENS] * used;
    const size_t rows = add ? pairs : pairs / used; /* of x */
    const uint32_t *w = call->buf[1], *route = call->buf[3];
    const float *x = call->buf[2];
    float *y = (float *)call->buf[4] + call->push[7];
    size_t begin, end;

    uint8_t *quants = NULL;
    if (fmt != PVR_F16) {
        quants = pvr_scratch(team, rows * weights_quants_nbytes(k, 1));
        if (!quants)
            return;
        pvr_split(team, rows * blocks, &begin, &end);
        for (size_t i = begin; i < end; i++)
            weights_quantise(x + i * WEIGHTS_BLOCK, quants + i * 44, 0, 1);
        pvr_barrier(team);
    }

    const size_t tiles = n / LANES, tile_words = blocks * weights_block_words(fmt);
    pvr_split(team, tiles, &begin, &end);
    for (size_t tile = begin; tile < end; tile++)
        for (size_t e = 0; e < count; e++) {
            const uint32_t *at = w + (e * tiles + tile) * tile_words;
            for (size_t p = 0; p < pairs; p++) {
                if (route[2 * p] - first != e)
                    continue;
                const size_t row = add ? p : p / used;
                vf sum = product(fmt, at, k, quants ? quants + row * blocks * 44 : NULL,
                                 x + row * k);
                float share;
                memcpy(&share, route + 2 * p + 1, 4);
                if (add)
                    sum = vf_mul(sum, vf_set1(share));
                float *to = y + (add ? p / used : p) * ldy + tile * LANES;
                weights_store(to, sum, LANES, (uint32_t)add);
            }
        }
}
