/* SPDX-License-Identifier: Apache-2.0 */
#include "lanes.h"

PVR_OP(last_to_first) {
    const size_t n = call->push[0], last = ((const uint32_t *)call->buf[0])[PVR_N_TOKENS] - 1;
    float *x = call->buf[1];
    size_t begin, end;
    pvr_split(team, n, &begin, &end);
    for (size_t i = begin; i < end; i++)
        x[i] = x[last * n + i];
}
