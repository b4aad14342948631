/* SPDX-License-Identifier: Apache-2.0 */
/* What both attentions share on the CPU. */
#ifndef PVR_ATTENTION_H
#define PVR_ATTENTION_H

#include "kv.h"

/* Words of the push constants, the same for both. */
enum { FORMAT, HEADS, KV_HEADS, DIM, CTX, SCALE, WINDOW, SOFTCAP };

/* The first of the positions before `end` that count. */
static inline size_t attention_begin(const pvr_call *call, size_t end) {
    const size_t window = call->push[WINDOW];
    return window && end > window ? end - window : 0;
}

/* Scaled scores, n of them, a multiple of LANES, under the soft cap: cap tanh(s / cap). */
PVR_INLINE void attention_cap(float *scores, size_t n, float cap) {
    const vf one = vf_set1(1), two = vf_set1(2), limit = vf_set1(cap);
    for (size_t i = 0; i < n; i += LANES) {
        vf power = vf_exp(vf_mul(vf_load(scores + i), vf_set1(2 / cap)));
        vf_store(scores + i, vf_mul(limit, vf_sub(one, vf_div(two, vf_add(power, one)))));
    }
}

#endif
