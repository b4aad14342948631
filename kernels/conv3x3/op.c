/* SPDX-License-Identifier: Apache-2.0 */
#include "conv.h"

PVR_OP(conv3x3) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const size_t cin = k[0], cout = k[1], rows = k[2], xs = k[3], x_tile = k[4], y_tile = k[5];
    size_t begin, end;
    pvr_split(team, (size_t)p[PVR_N_TILES] * rows, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t tile = i / rows, row = i % rows;
        const float *x = (const float *)call->buf[1] + tile * x_tile + row * cin * xs;
        float *y = (float *)call->buf[3] + tile * y_tile + row * cout * xs;
        const pvr_conv_row g = {
            {x, x + cin * xs, x + 2 * cin * xs}, call->buf[2], y, cin, cout, xs,
        };
        pvr_conv(&g, xs);
    }
}
