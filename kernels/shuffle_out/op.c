/* SPDX-License-Identifier: Apache-2.0 */
#include "video.h"

enum { CHUNK = 64 }; /* core pixels at a time: the four phases stay in the first cache */

PVR_OP(shuffle_out) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const uint32_t bits = k[0], stride = k[1], tw = k[2], th = k[3], halo = k[4];
    const size_t xs = k[5], f_tile = k[6], luma_tile = k[7];
    const float *base = call->buf[3], top = bits == 8 ? 255.0f : 65535.0f;
    uint32_t rows = p[PVR_HEIGHT] - p[PVR_BAND_Y];
    rows = rows < th ? rows : th;
    size_t begin, end;
    pvr_split(team, (size_t)p[PVR_N_TILES] * rows, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t tile = i / rows, row = i % rows;
        const uint32_t left = (p[PVR_COL0] + (uint32_t)tile) * tw;
        if (left >= p[PVR_WIDTH]) continue;
        const uint32_t cols = p[PVR_WIDTH] - left < tw ? p[PVR_WIDTH] - left : tw;
        const float *luma = (const float *)call->buf[2] + tile * luma_tile;
        luma += (row + halo - 2) * xs + halo - 2;
        const float *maps = (const float *)call->buf[1] + tile * f_tile + row * 4 * xs;
        for (uint32_t x0 = 0; x0 < cols; x0 += CHUNK) {
            float out[4][CHUNK];
            const uint32_t n = cols - x0 < CHUNK ? cols - x0 : CHUNK;
            for (uint32_t x = 0; x < n; x += VL) {
                vf acc[4] = {{0}};
                for (int t = 0; t < 25; t++) {
                    const vf s = *(const vf *)(luma + (t / 5) * xs + t % 5 + x0 + x);
                    for (int q = 0; q < 4; q++) acc[q] += s * base[25 * q + t];
                }
                for (int q = 0; q < 4; q++) {
                    const vf r = (acc[q] + *(const vf *)(maps + q * xs + x0 + x)) * top;
                    *(vf *)(out[q] + x) = r;
                }
            }
            for (int a = 0; a < 2; a++) {
                uint32_t *line = (uint32_t *)call->buf[4] + (2 * row + a) * stride;
                const float *even = out[2 * a], *odd = out[2 * a + 1];
                if (bits == 8) {
                    uint8_t *d = (uint8_t *)line + 2 * (left + x0);
                    for (uint32_t x = 0; x < n; x++) {
                        d[2 * x] = (uint8_t)pvr_quantise(even[x], top);
                        d[2 * x + 1] = (uint8_t)pvr_quantise(odd[x], top);
                    }
                } else {
                    uint16_t *d = (uint16_t *)line + 2 * (left + x0);
                    for (uint32_t x = 0; x < n; x++) {
                        d[2 * x] = (uint16_t)pvr_quantise(even[x], top);
                        d[2 * x + 1] = (uint16_t)pvr_quantise(odd[x], top);
                    }
                }
            }
        }
    }
}
