/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "lanes.h"

PVR_OP(softcap) {
    const size_t n = call->push[0];
    const float cap = pvr_push_f32(call, 1);
    float *x = call->buf[1];
    size_t begin, end;
    pvr_split(team, n, &begin, &end);
    for (size_t i = begin; i < end; i++)
        x[i] = cap * tanhf(x[i] / cap);
}
