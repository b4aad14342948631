/* SPDX-License-Identifier: Apache-2.0 */
#include "attention_decode.h"
#include "rope.h"

enum { ROPE_DIMS = SOFTCAP + 1, NEOX };

PVR_OP(attention_step) {
    const size_t heads = call->push[HEADS], kv_heads = call->push[KV_HEADS],
                 dim = call->push[DIM], ctx = call->push[CTX], half = call->push[ROPE_DIMS] / 2;
    const size_t pos = ((const uint32_t *)call->buf[0])[PVR_POS0];
    const int neox = call->push[NEOX] != 0;
    const float *turns = (const float *)call->buf[2] + pos * 2 * half;
    float *qkv = call->buf[1];
    size_t begin, end;
    pvr_split(team, heads + 2 * kv_heads, &begin, &end);
    for (size_t head = begin; head < end; head++) {
        float *x = qkv + head * dim, key[MAX_DIM];
        if (head < heads) {
            rope_turn(x, turns, half, neox);
            continue;
        }
        const size_t kv = head - heads;
        const kv_cache cache = kv_open(call->buf[kv < kv_heads ? 3 : 4], kv_heads * ctx, dim);
        memcpy(key, x, dim * sizeof(float));
        if (kv < kv_heads)
            rope_turn(key, turns, half, neox);
        kv_store(call->push[FORMAT], &cache, kv % kv_heads * ctx + pos, key);
    }
    pvr_barrier(team);
    attention_one(call, team, qkv, call->buf[3], call->buf[4], qkv);
}
