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
        /* Columns a..b lie inside of the frame, the others repeat its border. */
        const int a = pvr_clamp(-x0, (int)xs);
        int b = last + 1 - x0;
        b = b < a ? a : b > (int)xs ? (int)xs : b;
        float left, right;
        if (bits == 8) {
            const uint8_t *s = (const uint8_t *)line;
            left = scale * s[0], right = scale * s[last];
            for (int x = a; x < b; x++) y[x] = scale * s[x0 + x];
        } else {
            const uint16_t *s = (const uint16_t *)line;
            left = scale * s[0], right = scale * s[last];
            for (int x = a; x < b; x++) y[x] = scale * s[x0 + x];
        }
        for (int x = 0; x < a; x++) y[x] = left;
        for (int x = b; x < (int)xs; x++) y[x] = right;
    }
}
