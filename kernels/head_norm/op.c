/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of tokens (a head, or all of Q or K) are shared out over the team. */
#include <math.h>

#include "lanes.h"

static void norm(float *x, const float *w, size_t n, float eps) {
    vf sum = vf_set1(0);
    for (size_t i = 0; i < n; i += LANES) {
        vf a = vf_load_n(x + i, n - i);
        sum = vf_fma(a, a, sum);
    }
    const float factor = 1.0f / sqrtf(vf_sum(sum) / (float)n + eps);
    for (size_t i = 0; i < n; i++)
        x[i] *= factor * w[i];
}

PVR_OP(head_norm) {
    const size_t heads = call->push[0], kv_heads = call->push[1], dim = call->push[2];
    const float eps = pvr_push_f32(call, 3);
    const int whole = call->push[4] != 0;
    const float *w = call->buf[1];
    const size_t q_size = whole ? heads * dim : dim, k_size = whole ? kv_heads * dim : dim;
    const size_t queries = whole ? 1 : heads, vectors = queries + (whole ? 1 : kv_heads);
    size_t begin, end;
    pvr_split(team, ((const uint32_t *)call->buf[0])[PVR_N_TOKENS] * vectors, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t token = i / vectors, vector = i % vectors;
        float *row = (float *)call->buf[2] + token * (heads + 2 * kv_heads) * dim;
        if (vector < queries)
            norm(row + vector * q_size, w, q_size, eps);
        else
            norm(row + heads * dim + (vector - queries) * k_size, w + q_size, k_size, eps);
    }
}
