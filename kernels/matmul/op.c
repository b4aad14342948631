/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of 16 rows are shared out over the team; a tile's weights come from memory once, are
 * unpacked once for each block of WEIGHTS_TOKENS tokens and used from registers for all of them. */
#include "weights.h"

PVR_OP(matmul) {
    const uint32_t fmt = call->push[0], accumulate = call->push[3];
    const size_t n = call->push[1], k = call->push[2], ldy = call->push[5],
                 blocks = k / WEIGHTS_BLOCK;
    const size_t tokens = ((const uint32_t *)call->buf[0])[PVR_N_TOKENS];
    const uint32_t *w = call->buf[1];
    const float *x = call->buf[2];
    float *y = (float *)call->buf[3] + call->push[4];
    const size_t groups = (tokens + WEIGHTS_TOKENS - 1) / WEIGHTS_TOKENS;

    uint8_t *quants = NULL;
    const size_t group_bytes = weights_quants_nbytes(k, WEIGHTS_TOKENS);
    if (fmt != PVR_F16) {
        quants = pvr_scratch(team, group_bytes * groups);
        if (!quants)
            return;
        size_t begin, end;
        pvr_split(team, groups * blocks, &begin, &end);
        for (size_t i = begin; i < end; i++) {
            size_t group = i / blocks, b = i % blocks;
            uint8_t *block = quants + group * group_bytes + b * WEIGHTS_TOKENS * 44;
            for (size_t j = 0; j < WEIGHTS_TOKENS; j++) {
                size_t t = group * WEIGHTS_TOKENS + j;
                weights_quantise(t < tokens ? x + t * k + b * WEIGHTS_BLOCK : NULL, block, j,
                                 WEIGHTS_TOKENS);
            }
        }
        pvr_barrier(team);
    }

    const size_t tile_words = blocks * weights_block_words(fmt);
    size_t begin, end;
    pvr_split(team, (n + LANES - 1) / LANES, &begin, &end);
    for (size_t tile = begin; tile < end; tile++) {
        const uint32_t *at = w + tile * tile_words;
        size_t rows = n - tile * LANES < LANES ? n - tile * LANES : LANES;
        for (size_t group = 0; group < groups; group++) {
            const size_t first = group * WEIGHTS_TOKENS;
            vf sums[WEIGHTS_TOKENS];
            if (fmt == PVR_Q4) {
                weights_tile_q4(at, blocks, quants + group * group_bytes, WEIGHTS_TOKENS, sums);
            } else if (fmt == PVR_Q8) {
                weights_tile_q8(at, blocks, quants + group * group_bytes, WEIGHTS_TOKENS, sums);
            } else {
                const float
                    *row[WEIGHTS_TOKENS]; /* past the last token: the last once more, not stored */
                for (size_t j = 0; j < WEIGHTS_TOKENS; j++)
                    row[j] = x + (first + j < tokens ? first + j : tokens - 1) * k;
                weights_tile_f16(at, k, row, WEIGHTS_TOKENS, sums);
            }
            for (size_t j = 0; j < WEIGHTS_TOKENS && first + j < tokens; j++)
                weights_store(y + (first + j) * ldy + tile * LANES, sums[j], rows, accumulate);
        }
    }
}
