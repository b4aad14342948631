/* SPDX-License-Identifier: Apache-2.0 */
/* Tiles of 16 rows are shared out over the team; a tile's weights come from memory once, are
 * unpacked once for each block of `width` tokens and used from registers for all of them. */
#include "weights.h"

/* `width` is a constant where this is called: sums of so many tokens are in registers at a time. */
static inline __attribute__((always_inline)) void
multiply(pvr_team *team, const pvr_call *call, const size_t width) {
    const uint32_t fmt = call->push[0], accumulate = call->push[3];
    const size_t n = call->push[1], k = call->push[2], ldy = call->push[5],
                 blocks = k / WEIGHTS_BLOCK;
    const size_t tokens = ((const uint32_t *)call->buf[0])[PVR_N_TOKENS];
    const uint32_t *w = call->buf[1];
    const float *x = call->buf[2];
    float *y = (float *)call->buf[3] + call->push[4];
    const size_t groups = (tokens + width - 1) / width;

    uint8_t *quants = NULL;
    const size_t group_bytes = weights_quants_nbytes(k, width);
    if (fmt != PVR_F16) {
        quants = pvr_scratch(team, group_bytes * groups);
        if (!quants)
            return;
        size_t begin, end;
        pvr_split(team, groups * blocks, &begin, &end);
        for (size_t i = begin; i < end; i++) {
            size_t group = i / blocks, b = i % blocks;
            uint8_t *block = quants + group * group_bytes + b * width * 44;
            for (size_t j = 0; j < width; j++) {
                size_t t = group * width + j;
                weights_quantise(t < tokens ? x + t * k + b * WEIGHTS_BLOCK : NULL, block, j,
                                 width);
            }
        }
        pvr_barrier(team);
    }

    /* Halves: one after the other the groups fetch a part each of the next tile, or a single one what
     * it needs soon itself. */
    size_t parts = 1;
    while (2 * parts <= groups && parts < WEIGHTS_K)
        parts *= 2;
    const size_t step = WEIGHTS_K / parts;

    const size_t tile_words = blocks * weights_block_words(fmt);
    size_t begin, end;
    pvr_split(team, (n + LANES - 1) / LANES, &begin, &end);
    for (size_t tile = begin; tile < end; tile++) {
        const uint32_t *at = w + tile * tile_words;
        size_t rows = n - tile * LANES < LANES ? n - tile * LANES : LANES;
        for (size_t group = 0; group < groups; group++) {
            const size_t first = group * width;
            vf sums[WEIGHTS_TOKENS];
            if (fmt == PVR_Q4) {
                weights_tile_q4(at, blocks, quants + group * group_bytes, width, sums);
            } else if (fmt == PVR_Q8) {
                weights_tile_q8(at, blocks, quants + group * group_bytes, width, sums);
            } else {
                const float
                    *row[WEIGHTS_TOKENS]; /* past the last token: the last once more, not stored */
                for (size_t j = 0; j < width; j++)
                    row[j] = x + (first + j < tokens ? first + j : tokens - 1) * k;
                uintptr_t ahead = (uintptr_t)at;
                if (group < parts)
                    ahead += parts > 1 ? (k * WEIGHTS_K + group * k * step) : WEIGHTS_AHEAD;
                weights_tile_f16(at, k, row, width, ahead, group < parts ? step : 0, sums);
            }
            for (size_t j = 0; j < width && first + j < tokens; j++)
                weights_store(y + (first + j) * ldy + tile * LANES, sums[j], rows, accumulate);
        }
    }
}

/* A function for each width: a compiler that takes vectors apart (RISC-V's plain path) needs memory by a function's size. */
#define MULTIPLY(WIDTH)                                                                          \
    static __attribute__((noinline)) void multiply_##WIDTH(pvr_team *team, const pvr_call *call) { \
        multiply(team, call, WIDTH);                                                             \
    }
MULTIPLY(2)
MULTIPLY(4)
MULTIPLY(WEIGHTS_TOKENS)

PVR_OP(matmul) {
    const size_t tokens = ((const uint32_t *)call->buf[0])[PVR_N_TOKENS];
    if (tokens <= 2)
        multiply_2(team, call);
    else if (tokens <= 4)
        multiply_4(team, call);
    else
        multiply_WEIGHTS_TOKENS(team, call);
}
