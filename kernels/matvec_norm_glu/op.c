/* SPDX-License-Identifier: Apache-2.0 */
/* Every thread normalises all of x for itself, and takes tiles of the gate with those of the unit. */
#include "glu.h"
#include "matvec.h"
#include "norm.h"

PVR_OP(matvec_norm_glu) {
    const size_t n = call->push[1], k = call->push[2], up = call->push[7] / LANES;
    const float *x = (const float *)call->buf[2] + ((const uint32_t *)call->buf[0])[PVR_LAST_ROW] * k;
    const float *w = call->buf[3];
    float *h = matvec_scratch(call, team, k);
    if (!h)
        return;
    const float factor = norm_factor(x, k, pvr_push_f32(call, 5));
    for (size_t i = 0; i < k; i++)
        h[i] = x[i] * factor * w[i];
    const matvec_x vector = matvec_open(call, h, (uint8_t *)(h + k));
    float *y = (float *)call->buf[4] + call->push[4];
    size_t begin, end;
    pvr_split(team, (n + LANES - 1) / LANES, &begin, &end);
    for (size_t tile = begin; tile < end; tile++) {
        const size_t rows = n - tile * LANES;
        float gate[LANES], unit[LANES];
        vf_store_n(gate, matvec_tile(&vector, call->buf[1], tile), LANES);
        vf_store_n(unit, matvec_tile(&vector, call->buf[1], up + tile), LANES);
        glu(gate, unit, unit, LANES, call->push[6]);
        weights_store(y + tile * LANES, vf_load(unit), rows < LANES ? rows : LANES, call->push[3]);
    }
}
