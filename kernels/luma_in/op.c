/* SPDX-License-Identifier: Apache-2.0 */
#include "video.h"

PVR_OP(luma_in) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const uint32_t bits = k[0], stride = k[1], tw = k[2], rows = k[3] + 2 * k[4], xs = k[5];
    const uint32_t y_tile = k[6];
    const int halo = (int)k[4], last = (int)p[PVR_WIDTH] - 1;
    const float scale = pvr_push_f32(call, 7);
    size_t begin, end;
    pvr_split(team, (size_t)p[PVR_N_TILES] * rows, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const uint32_t tile = (uint32_t)(i / rows), row = (uint32_t)(i % rows);
        const int fy = pvr_clamp((int)(p[PVR_BAND_Y] + row) - halo, (int)p[PVR_HEIGHT] - 1);
        const size_t src_row = (size_t)(fy - (int)p[PVR_SRC_Y]);
        const uint32_t *line = (const uint32_t *)call->buf[1] + src_row * stride;
        float *y = (float *)call->buf[2] + (size_t)tile * y_tile + (size_t)row * xs;
        const int x0 = (int)((p[PVR_COL0] + tile) * tw) - halo;
        pvr_samples((int)bits, line, last, x0, (int)xs, scale, y);
    }
}
