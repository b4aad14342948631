/* SPDX-License-Identifier: Apache-2.0 */
/* Rows are shared out over the team. */
#include <math.h>

#include "lanes.h"

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
        vf sum = vf_set1(0), sum2 = vf_set1(0);
        size_t i = 0;
        for (; i + 2 * LANES <= k; i += 2 * LANES) {
            vf a = vf_load(x + i), b = vf_load(x + i + LANES);
            sum = vf_fma(a, a, sum);
            sum2 = vf_fma(b, b, sum2);
        }
        for (; i < k; i += LANES) {
            vf a = vf_load_n(x + i, k - i);
            sum = vf_fma(a, a, sum);
        }
        const float factor = 1.0f / sqrtf(vf_sum(vf_add(sum, sum2)) / (float)k + eps);
        for (i = 0; i < k; i++)
            y[i] = x[i] * factor * w[i] + (add ? y[i] : 0);
    }
}
