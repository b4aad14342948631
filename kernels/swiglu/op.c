/* SPDX-License-Identifier: Apache-2.0 */
/* Rows, cut into pieces of 64 elements, are shared out over the team. */
#include "glu.h"

enum { PIECE = 64 };

PVR_OP(swiglu) {
    const size_t f = call->push[0], each = call->push[2], pieces = (f + PIECE - 1) / PIECE;
    const uint32_t act = call->push[1];
    size_t begin, end;
    pvr_split(team, ((const uint32_t *)call->buf[0])[PVR_N_TOKENS] * each * pieces, &begin, &end);
    for (size_t piece = begin; piece < end; piece++) {
        const size_t row = piece / pieces, from = piece % pieces * PIECE;
        const size_t n = f - from < PIECE ? f - from : PIECE;
        const float *gate = (const float *)call->buf[1] + row * 2 * f + from;
        float *h = (float *)call->buf[2] + row * f + from;
        for (size_t i = 0; i < n; i += LANES)
            glu(gate + i, gate + f + i, h + i, n - i, act);
    }
}
