/* SPDX-License-Identifier: Apache-2.0 */
#include "maps.h"
#include "samples.h"

PVR_OP(maps_out) {
    const uint32_t *p = call->buf[0], *k = call->push, bits = k[0];
    const size_t stride = k[1], step = k[2], half = k[3], centred = k[4], s = k[7], lanes = k[8];
    const long frame_w = k[5], frame_h = k[6], w = k[9], h = k[10];
    const size_t xs = k[11], origin = k[13];
    const float top = bits == 8 ? 255.0f : 65535.0f, offset = pvr_push_f32(call, 20);
    const float *x = call->buf[1];
    const long left = (long)(s * p[MAPS_X0]), above = (long)(s * p[MAPS_Y0]);
    const size_t by = half ? 2 : 1, x0 = s * p[MAPS_CORE_X0] / by, y0 = s * p[MAPS_CORE_Y0] / by;
    const size_t x1 = (s * p[MAPS_CORE_X1] + by - 1) / by, y1 = (s * p[MAPS_CORE_Y1] + by - 1) / by;
    /* taps of a row: columns beside the sample and their shares */
    const int first = half && !centred ? -1 : 0, taps = !half ? 1 : centred ? 2 : 3;
    const float share[3] = {!half ? 1.0f : centred ? 0.5f : 0.25f, 0.5f, 0.25f};
    size_t begin, end;
    pvr_split(team, y1 - y0, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        uint32_t *to = (uint32_t *)call->buf[2] + i * stride;
        const float *line[2];
        for (size_t a = 0; a < by; a++) {
            const long row = samples_held(samples_held((long)(by * (y0 + i) + a), frame_h) - above, h);
            line[a] = x + (origin + (size_t)row * xs) * lanes;
        }
        for (size_t j = x0; j < x1; j++) {
            float mean[3] = {0};
            for (int t = 0; t < taps; t++) {
                const long at = samples_held((long)(by * j) + first + t, frame_w) - left;
                for (size_t a = 0; a < by; a++)
                    for (int c = 0; c < 3; c++) {
                        float v = line[a][(size_t)samples_held(at, w) * lanes + (size_t)c];
                        v = v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f;
                        mean[c] += v * share[t] / (float)by;
                    }
            }
            for (size_t b = 0; b < step; b++) {
                float v = offset;
                for (int c = 0; c < 3; c++) v += pvr_push_f32(call, 14 + 3 * (int)b + c) * mean[c];
                samples_put(to, step * j + b, bits, samples_quantised(v, top));
            }
        }
    }
}
