/* SPDX-License-Identifier: Apache-2.0 */
/* Rows are shared out over the team. */
#include <math.h>

#include "lanes.h"

PVR_OP(row_gate) {
    const size_t n = call->push[0];
    const float *g = call->buf[1];
    size_t begin, end;
    pvr_split(team, ((const uint32_t *)call->buf[0])[PVR_N_TOKENS], &begin, &end);
    for (size_t row = begin; row < end; row++) {
        float *y = (float *)call->buf[2] + row * n;
        const float part = 1 / (1 + expf(-g[row]));
        for (size_t i = 0; i < n; i++)
            y[i] *= part;
    }
}
