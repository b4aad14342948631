/* SPDX-License-Identifier: Apache-2.0 */
/* weights.h's tiles of quants for RISC-V's V: a k of 16 rows is a vector, and the activation that it
 * meets a scalar, which is what vwmacc.vx and vmacc.vx take. A word of the tile has four k of a row,
 * which shifts part. Loops over words stay loops: unrolled, compilers load ahead of what they have
 * registers for. */
#ifndef PVR_WEIGHTS_RVV_H
#define PVR_WEIGHTS_RVV_H

#include "lanes.h"

typedef uint8_t b_group __attribute__((vector_size(LANES)));
typedef int16_t s_group __attribute__((vector_size(LANES * 2)));

PVR_INLINE u_group weights_words_(const uint32_t *p) {
    u_group w;
    memcpy(&w, p, sizeof w);
    return w;
}

/* sums[t] = one tile (16 rows) times `tokens` columns of rounded activations (weights_quantise), in
 * q4 or q8. `tokens` has to be a constant. */
PVR_INLINE void weights_tile_q4(const uint32_t *tile, size_t blocks, const uint8_t *quants,
                                size_t tokens, vf *sums) {
    for (size_t t = 0; t < tokens; t++)
        sums[t] = vf_set1(0);
    for (size_t b = 0; b < blocks; b++, tile += WEIGHTS_Q4, quants += tokens * 44) {
        const int8_t *q = (const int8_t *)quants;
        const float *scale = (const float *)(quants + tokens * WEIGHTS_BLOCK),
                    *sum = scale + tokens;
        /* 16 products each, of at most 15 * 127: no overflow. */
        s_group low[WEIGHTS_TOKENS] = {{0}}, high[WEIGHTS_TOKENS] = {{0}};
#pragma GCC unroll 1
        for (int j = 0; j < 4; j++) {
            const u_group words = weights_words_(tile + 16 + 16 * j);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const b_group both = __builtin_convertvector(words >> (8 * i), b_group);
                const s_group first = __builtin_convertvector(both & 15, s_group);
                const s_group second = __builtin_convertvector(both >> 4, s_group);
#pragma GCC unroll 4
                for (size_t t = 0; t < tokens; t++) {
                    const int8_t *x = q + t * WEIGHTS_BLOCK + 8 * j + i;
                    low[t] += first * (int16_t)x[0];
                    high[t] += second * (int16_t)x[4];
                }
            }
        }
        vf factor, minimum;
        vf_half2(tile, &factor, &minimum);
#pragma GCC unroll 4
        for (size_t t = 0; t < tokens; t++) {
            const vi dot = {{__builtin_convertvector(low[t], i_group) +
                             __builtin_convertvector(high[t], i_group)}};
            sums[t] = vf_fma(vf_of_int(dot), vf_mul(factor, vf_set1(scale[t])), sums[t]);
            sums[t] = vf_fma(minimum, vf_set1(sum[t]), sums[t]);
        }
    }
}

PVR_INLINE void weights_tile_q8(const uint32_t *tile, size_t blocks, const uint8_t *quants,
                                size_t tokens, vf *sums) {
    for (size_t t = 0; t < tokens; t++)
        sums[t] = vf_set1(0);
    for (size_t b = 0; b < blocks; b++, tile += WEIGHTS_Q8, quants += tokens * 44) {
        const int8_t *q = (const int8_t *)quants;
        const float *scale = (const float *)(quants + tokens * WEIGHTS_BLOCK);
        i_group dot[WEIGHTS_TOKENS] = {{0}};
#pragma GCC unroll 1
        for (int j = 0; j < 8; j++) {
            const u_group words = weights_words_(tile + 16 + 16 * j);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const i_group w = (i_group)(words << (24 - 8 * i)) >> 24;
#pragma GCC unroll 4
                for (size_t t = 0; t < tokens; t++)
                    dot[t] += w * q[t * WEIGHTS_BLOCK + 4 * (size_t)j + (size_t)i];
            }
        }
        vf factor, none;
        vf_half2(tile, &factor, &none);
#pragma GCC unroll 4
        for (size_t t = 0; t < tokens; t++)
            sums[t] = vf_fma(vf_of_int((vi){{dot[t]}}), vf_mul(factor, vf_set1(scale[t])), sums[t]);
    }
}

#endif
