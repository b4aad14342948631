/* SPDX-License-Identifier: Apache-2.0 */
#include "attention_decode.h"

PVR_OP(attention_decode) {
    attention_one(call, team, call->buf[1], call->buf[2], call->buf[3], call->buf[4]);
}
