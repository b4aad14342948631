/* SPDX-License-Identifier: Apache-2.0 */
/* Every thread computes the whole unit for itself. */
#include "glu.h"
#include "matvec.h"

PVR_OP(matvec_glu) {
    const size_t k = call->push[2]; /* a multiple of 32 */
    const float *gate = call->buf[2];
    float *x = matvec_scratch(call, team, k);
    if (!x)
        return;
    for (size_t i = 0; i < k; i += LANES)
        glu(gate + i, gate + k + i, x + i, LANES, call->push[5]);
    matvec_multiply(call, team, call->buf[1], x, (uint8_t *)(x + k), call->buf[3]);
}
