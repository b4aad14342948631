/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens are shared out over the team; a block of a row is unpacked at a time. */
#include "lanes.h"
#include "weights.h"

static float half(uint32_t bits) {
    uint16_t h = (uint16_t)bits;
    float lanes[LANES];
    vf_store(lanes, vf_half_n(&h, 1));
    return lanes[0];
}

static void unpack_block(uint32_t fmt, const uint32_t *block, size_t lane, float *out) {
    if (fmt == PVR_F16) {
        const uint16_t *h = (const uint16_t *)block;
        uint16_t column[WEIGHTS_BLOCK];
        for (size_t i = 0; i < WEIGHTS_BLOCK; i++)
            column[i] = h[i * LANES + lane];
        vf_store(out, vf_half(column));
        vf_store(out + LANES, vf_half(column + LANES));
        return;
    }
    const float scale = half(block[lane] & 0xffffu), minimum = half(block[lane] >> 16);
    const uint32_t *words = block + LANES + lane;
    if (fmt == PVR_Q4) {
        for (size_t i = 0; i < WEIGHTS_BLOCK; i++) {
            uint32_t word = words[i / 8 * LANES];
            out[i] = scale * (float)(word >> (i % 4 * 8 + i % 8 / 4 * 4) & 15u) + minimum;
        }
        return;
    }
    for (size_t i = 0; i < WEIGHTS_BLOCK; i++)
        out[i] = scale * (float)(int8_t)(words[i / 4 * LANES] >> (i % 4 * 8));
}

PVR_OP(embed) {
    const float factor = pvr_push_f32(call, 4);
    const uint32_t fmt = call->push[0], row0 = call->push[2], rows = call->push[3];
    const size_t k = call->push[1], blocks = k / WEIGHTS_BLOCK, words = weights_block_words(fmt);
    const uint32_t *ids = call->buf[1], *table = call->buf[2];
    float *out = call->buf[3];
    size_t begin, end;
    pvr_split(team, ((const uint32_t *)call->buf[0])[PVR_N_TOKENS], &begin, &end);
    for (size_t t = begin; t < end; t++) {
        const uint32_t row = ids[t] - row0; /* wraps below row0, and is then beyond rows */
        if (row >= rows)
            continue;
        const uint32_t *tile = table + row / LANES * blocks * words;
        for (size_t b = 0; b < blocks; b++)
            unpack_block(fmt, tile + b * words, row % LANES, out + t * k + b * WEIGHTS_BLOCK);
        for (size_t i = 0; factor != 1 && i < k; i++)
            out[t * k + i] *= factor;
    }
}
