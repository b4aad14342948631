/* SPDX-License-Identifier: Apache-2.0 */
#include "video.h"

PVR_OP(skip_add) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const size_t channels = k[0], rows = k[1], offset = k[2], xs = k[3], size = k[4];
    const float *slope = call->buf[2];
    size_t begin, end;
    pvr_split(team, (size_t)p[PVR_N_TILES] * rows, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t tile = i / rows, row = i % rows;
        const float *kept = (const float *)call->buf[1] + tile * size + offset;
        kept += (row + offset) * channels * xs;
        float *y = (float *)call->buf[3] + tile * size + row * channels * xs;
        for (size_t c = 0; c < channels; c++, y += xs, kept += xs)
            for (size_t x = 0; x < xs; x += VL) {
                const vf r = *(vf *)(y + x) + *(const vf *)(kept + x), s = r * slope[c];
                const vi up = r > 0.0f;
                *(vf *)(y + x) = (vf)((up & (vi)r) | (~up & (vi)s));
            }
    }
}
