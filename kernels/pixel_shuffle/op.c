/* SPDX-License-Identifier: Apache-2.0 */
#include "maps.h"

PVR_OP(pixel_shuffle) {
    const uint32_t *k = call->push;
    const size_t blocks = k[0], lanes = k[1], xl = k[2], channels = k[3], s = k[4], down = k[5];
    const size_t cs = k[6], as = k[7], bs = k[8], x_xs = k[11], x_ps = k[12], x_origin = k[13];
    const size_t w = k[14], h = k[15], xs = k[16], ps = k[17], origin = k[18];
    const float *x = call->buf[1];
    float *y = call->buf[2];
    const size_t count = down ? channels * s * s : channels;
    size_t begin, end;
    pvr_split(team, blocks * h, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t row = i % h, first = i / h * lanes;
        float *to = y + (i / h * ps + origin + row * xs) * lanes;
        for (size_t l = 0; l < lanes; l++) {
            const size_t d = first + l;
            if (d >= count) {
                for (size_t j = 0; j < w; j++) to[j * lanes + l] = 0.0f;
                continue;
            }
            if (down) {
                const size_t c = d / cs % channels, a = d / as % s, b = d / bs % s;
                const float *from = x + (c / xl * x_ps + x_origin + (row * s + a) * x_xs + b) * xl + c % xl;
                for (size_t j = 0; j < w; j++) to[j * lanes + l] = from[j * s * xl];
                continue;
            }
            for (size_t b = 0; b < s; b++) {
                const size_t c = d * cs + row % s * as + b * bs;
                const float *from = x + (c / xl * x_ps + x_origin + row / s * x_xs) * xl + c % xl;
                for (size_t j = b; j < w; j += s, from += xl) to[j * lanes + l] = *from;
            }
        }
    }
}
