/* SPDX-License-Identifier: Apache-2.0 */
#include "video.h"

enum { CHUNK = 256, ROOM = CHUNK + 4 + VL };

/* Pixels x0-2 .. x0+n+1 of component c of a line as floats, the border repeated. */
static void gather(float *out, const void *line, int bits, int step, int c, int x0, int n, int last) {
    for (int i = 0; i < n + 4; i++) {
        const int at = pvr_clamp(x0 + i - 2, last) * step + c;
        out[i] = bits == 8 ? (float)((const uint8_t *)line)[at] : (float)((const uint16_t *)line)[at];
    }
    for (int i = n + 4; i < ROOM; i++) out[i] = 0.0f;
}

PVR_OP(chroma_x2) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const int bits = (int)k[0], step = (int)k[1], width = (int)p[PVR_C_WIDTH];
    const size_t stride = k[2], out_stride = k[3], room = out_stride * (bits == 8 ? 4 : 2);
    const float *filters = call->buf[2], top = bits == 8 ? 255.0f : 65535.0f;
    size_t begin, end;
    pvr_split(team, p[PVR_C_ROWS], &begin, &end);
    for (size_t row = begin; row < end; row++)
        for (int x0 = 0; x0 < width; x0 += CHUNK)
            for (int c = 0; c < step; c++) {
                const int n = width - x0 < CHUNK ? width - x0 : CHUNK;
                float in[5][ROOM], out[4][CHUNK];
                for (int t = 0; t < 5; t++) {
                    const int fy = pvr_clamp((int)(p[PVR_C_BAND_Y] + row) + t - 2, (int)p[PVR_C_HEIGHT] - 1);
                    const uint32_t *line = (const uint32_t *)call->buf[1] + (size_t)(fy - (int)p[PVR_C_SRC_Y]) * stride;
                    gather(in[t], line, bits, step, c, x0, n, width - 1);
                }
                for (int x = 0; x < n; x += VL) {
                    vf acc[4] = {{0}};
                    for (int t = 0; t < 25; t++) {
                        const vf s = *(const vf *)(in[t / 5] + x + t % 5);
                        for (int q = 0; q < 4; q++) acc[q] += s * filters[25 * q + t];
                    }
                    for (int q = 0; q < 4; q++) *(vf *)(out[q] + x) = acc[q];
                }
                for (int q = 0; q < 4; q++) {
                    void *line = (uint32_t *)call->buf[3] + (2 * row + (size_t)(q / 2)) * out_stride;
                    for (int x = 0; x < n; x++) {
                        const size_t at = (size_t)(2 * (x0 + x) + q % 2) * (size_t)step + (size_t)c;
                        if (at >= room) continue;
                        if (bits == 8) ((uint8_t *)line)[at] = (uint8_t)pvr_quantise(out[q][x], top);
                        else ((uint16_t *)line)[at] = (uint16_t)pvr_quantise(out[q][x], top);
                    }
                }
            }
}
