/* SPDX-License-Identifier: Apache-2.0 */
/* Heads of tokens are shared out over the team. */
#include "kv.h"
#include "rope.h"

enum { FORMAT, HEADS, KV_HEADS, DIM, CTX, ROPE_DIMS, NEOX };

PVR_OP(rope_kv) {
    const uint32_t *params = call->buf[0];
    const size_t heads = call->push[HEADS], kv_heads = call->push[KV_HEADS],
                 dim = call->push[DIM], ctx = call->push[CTX];
    const size_t rope_dims = call->push[ROPE_DIMS], width = heads + 2 * kv_heads;
    const int neox = call->push[NEOX] != 0;
    const float *table = call->buf[2];
    const kv_cache keys = kv_open(call->buf[3], kv_heads * ctx, dim),
                   values = kv_open(call->buf[4], kv_heads * ctx, dim);
    size_t begin, end;
    pvr_split(team, params[PVR_N_TOKENS] * width, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t head = i % width, pos = params[PVR_POS0] + i / width;
        float *x = (float *)call->buf[1] + i * dim;
        if (head < heads + kv_heads)
            rope_turn(x, table + pos * rope_dims, rope_dims / 2, neox);
        if (head < heads)
            continue;
        const size_t kv = head - heads;
        const kv_cache *cache = kv < kv_heads ? &keys : &values;
        kv_store(call->push[FORMAT], cache, kv % kv_heads * ctx + pos, x);
    }
}
