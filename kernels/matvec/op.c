/* SPDX-License-Identifier: Apache-2.0 */
#include "matvec.h"

PVR_OP(matvec) {
    uint8_t *quants = NULL;
    if (call->push[0] != PVR_F16 && !(quants = (uint8_t *)matvec_scratch(call, team, 0)))
        return;
    matvec_multiply(call, team, call->buf[1], call->buf[2], quants, call->buf[3]);
}
