/* SPDX-License-Identifier: Apache-2.0 */
#include "video.h"

PVR_OP(shuffle_out) {
    const uint32_t *k = call->push;
    const int bits = (int)k[0], scale = (int)k[1], step = (int)k[2], component = (int)k[3];
    const uint32_t *p = call->buf[0], *frame = p + k[4];
    const uint32_t width = frame[0], height = frame[1], band_y = frame[2];
    const uint32_t tw = k[6], th = k[7], halo = k[8];
    const size_t stride = k[5], xs = k[9], x_row = k[10], f_tile = k[11], x_tile = k[12];
    const size_t channels = ((size_t)(scale * scale) + 3) / 4 * 4;
    const uint32_t rows = height - band_y < th ? height - band_y : th;
    size_t begin, end;
    pvr_split(team, (size_t)p[PVR_N_TILES] * rows, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t tile = i / rows, row = i % rows;
        const uint32_t left = (p[PVR_COL0] + (uint32_t)tile) * tw;
        if (left >= width) continue;
        const uint32_t cols = width - left < tw ? width - left : tw;
        const float *x = (const float *)call->buf[2] + tile * x_tile;
        pvr_pixels g = {
            .base = call->buf[3],
            .maps = (const float *)call->buf[1] + tile * f_tile + row * channels * xs,
            .xs = xs,
            .across = (size_t)scale,
        };
        for (size_t t = 0; t < 5; t++) g.x[t] = x + (row + halo - 2 + t) * x_row + halo - 2;
        uint32_t *line = (uint32_t *)call->buf[4] + (size_t)scale * row * stride;
        pvr_enlarge(&g, bits, scale, step, component, line, stride, left, cols);
    }
}
