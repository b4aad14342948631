/* SPDX-License-Identifier: Apache-2.0 */
/* Rows are shared out over the team; a vector is the lanes of a pixel, or of four thin ones. */
#include "maps.h"

enum { ALONE, SUM, PRODUCT };

/* Sixteen of a constant's floats for block b; those of thin maps four times over. */
static vf constant(const float *w, size_t b, size_t lanes) {
    float some[LANES];
    for (size_t i = 0; i < LANES; i++) some[i] = w[b * lanes + i % lanes];
    return vf_load(some);
}

PVR_OP(pointwise) {
    const uint32_t *k = call->push, mode = k[2], act = k[3];
    const size_t blocks = k[0], lanes = k[1], w = k[4], h = k[5], xs = k[6], ps = k[7], origin = k[8];
    const float *a = call->buf[1], *b = call->buf[2], *c = call->buf[3];
    float *y = call->buf[4];
    size_t begin, end;
    pvr_split(team, blocks * h, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t block = i / h, n = blocks * lanes;
        const vf s = constant(c, block, lanes), t = constant(c + n, block, lanes);
        const vf u = constant(c + 2 * n, block, lanes), slope = constant(c + 3 * n, block, lanes);
        const size_t at = (block * ps + origin + i % h * xs) * lanes;
        for (size_t j = 0; j < w * lanes; j += LANES) {
            const size_t left = w * lanes - j;
            vf v = vf_fma(s, vf_load_n(a + at + j, left), t);
            if (mode == SUM) v = vf_fma(u, vf_load_n(b + at + j, left), v);
            else if (mode == PRODUCT) v = vf_mul(v, vf_load_n(b + at + j, left));
            vf_store_n(y + at + j, maps_activated(act, v, slope, vf_set1(0.0f)), left);
        }
    }
}
