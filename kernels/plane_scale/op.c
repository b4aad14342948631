/* SPDX-License-Identifier: Apache-2.0 */
#include "maps.h"
#include "samples.h"

enum { TAPS = 4, REACH = 2 };

PVR_OP(plane_scale) {
    const uint32_t *p = call->buf[0], *k = call->push, bits = k[0];
    const size_t stride = k[1], out_stride = k[2], step = k[3], by = k[4] ? 2 : 1, s = k[5];
    const long w = k[6], h = k[7];
    const float *down = call->buf[2], *across = down + TAPS * s;
    const float *down_start = across + TAPS * s, *across_start = down_start + s;
    const float top = bits == 8 ? 255.0f : 65535.0f;
    const long y0 = (long)(p[MAPS_CORE_Y0] / by), y1 = (long)((p[MAPS_CORE_Y1] + by - 1) / by);
    const long first = y0 > REACH ? y0 - REACH : 0;
    const uint32_t *src = call->buf[1];
    uint32_t *dst = call->buf[3];
    const size_t n = (size_t)w * step;
    float *scratch = pvr_scratch(team, sizeof(float) * n * (size_t)team->n);
    if (!scratch)
        return;
    float *tall = scratch + n * (size_t)team->tid;
    size_t begin, end;
    pvr_split(team, (size_t)(y1 - y0) * s, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const float *weight = down + i % s * TAPS;
        const long row = y0 + (long)(i / s) + (long)down_start[i % s];
        memset(tall, 0, n * sizeof *tall);
        for (long a = 0; a < TAPS; a++) {
            const void *line = src + (size_t)(samples_held(row + a, h) - first) * stride;
            for (size_t j = 0; j < n; j++) tall[j] += weight[a] * samples_get(line, j, bits);
        }
        void *to = dst + i * out_stride;
        for (size_t j = 0; j < (size_t)w * s; j++) {
            const long left = (long)(j / s) + (long)across_start[j % s];
            for (size_t c = 0; c < step; c++) {
                float v = 0.0f;
                for (long b = 0; b < TAPS; b++)
                    v += across[j % s * TAPS + (size_t)b] * tall[(size_t)samples_held(left + b, w) * step + c];
                samples_put(to, j * step + c, bits, samples_quantised(v, top));
            }
        }
    }
}
