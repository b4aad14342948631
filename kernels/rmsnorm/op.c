/* SPDX-License-Identifier: Apache-2.0 */
/* Rows are shared out over the team. */
#include "norm.h"

PVR_OP(rmsnorm) {
    const uint32_t *params = call->buf[0];
    const size_t k = call->push[0], last = call->push[2], add = call->push[3];
    const float eps = pvr_push_f32(call, 1);
    const float *w = call->buf[2];
    size_t begin, end;
    pvr_split(team, last ? 1 : params[PVR_N_TOKENS], &begin, &end);
    for (size_t row = begin; row < end; row++) {
        const float *x = (const float *)call->buf[1] + (last ? params[PVR_LAST_ROW] : row) * k;
        float *y = (float *)call->buf[3] + row * k;
        const float factor = norm_factor(x, k, eps);
        for (size_t i = 0; i < k; i++)
            y[i] = x[i] * factor * w[i] + (add ? y[i] : 0);
    }
}
