/* SPDX-License-Identifier: Apache-2.0 */
/* Every thread normalises all of x for itself. */
#include "matvec.h"
#include "norm.h"

PVR_OP(matvec_norm) {
    const size_t k = call->push[2];
    const float *x = (const float *)call->buf[2] + ((const uint32_t *)call->buf[0])[PVR_LAST_ROW] * k;
    const float *w = call->buf[3];
    float *y = matvec_scratch(call, team, k);
    if (!y)
        return;
    const float factor = norm_factor(x, k, pvr_push_f32(call, 5));
    for (size_t i = 0; i < k; i++)
        y[i] = x[i] * factor * w[i];
    matvec_multiply(call, team, call->buf[1], y, (uint8_t *)(y + k), call->buf[4]);
}
