/* SPDX-License-Identifier: Apache-2.0 */
#include "chroma.h"

PVR_OP(chroma_in) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const pvr_chroma g = {
        .bits = (int)k[0], .step = (int)k[1], .component = (int)k[2], .stride = k[3],
        .luma_stride = k[4], .src = call->buf[1], .luma = call->buf[2],
        .scale = pvr_push_f32(call, 10),
    };
    const uint32_t tw = k[5], rows = k[6] + 2 * k[7], y_tile = k[9];
    const int halo = (int)k[7], xs = (int)k[8];
    size_t begin, end;
    pvr_split(team, (size_t)p[PVR_N_TILES] * rows, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const uint32_t tile = (uint32_t)(i / rows), row = (uint32_t)(i % rows);
        float *y = (float *)call->buf[3] + (size_t)tile * y_tile + (size_t)row * 5 * (size_t)xs;
        pvr_chroma_row(&g, p, (int)(p[PVR_C_BAND_Y] + row) - halo,
                       (int)((p[PVR_COL0] + tile) * tw) - halo, xs, (size_t)xs, y);
    }
}
