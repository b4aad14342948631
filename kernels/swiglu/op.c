/* SPDX-License-Identifier: Apache-2.0 */
/* Rows, cut into pieces of 64 elements, are shared out over the team. */
#include "lanes.h"

enum { PIECE = 64 };

PVR_INLINE void gated(const float *gate, const float *up, float *h, size_t n, uint32_t act) {
    const vf one = vf_set1(1), g = vf_load_n(gate, n);
    vf z = g;
    if (act) { /* GELU: 2 sqrt(2 / pi) (g + 0.044715 g^3) */
        vf inner = vf_fma(vf_mul(g, g), vf_set1(0.0713548163f), vf_set1(1.5957691216f));
        z = vf_mul(g, inner);
    }
    const vf sigmoid = vf_div(one, vf_add(one, vf_exp(vf_sub(vf_set1(0), z))));
    vf_store_n(h, vf_mul(vf_mul(g, sigmoid), vf_load_n(up, n)), n);
}

PVR_OP(swiglu) {
    const size_t f = call->push[0], each = call->push[2], pieces = (f + PIECE - 1) / PIECE;
    const uint32_t act = call->push[1];
    size_t begin, end;
    pvr_split(team, ((const uint32_t *)call->buf[0])[PVR_N_TOKENS] * each * pieces, &begin, &end);
    for (size_t piece = begin; piece < end; piece++) {
        const size_t row = piece / pieces, from = piece % pieces * PIECE;
        const size_t n = f - from < PIECE ? f - from : PIECE;
        const float *gate = (const float *)call->buf[1] + row * 2 * f + from;
        float *h = (float *)call->buf[2] + row * f + from;
        for (size_t i = 0; i < n; i += LANES)
            gated(gate + i, gate + f + i, h + i, n - i, act);
    }
}
