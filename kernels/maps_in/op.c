/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "maps.h"
#include "samples.h"

typedef struct { long a, b; float share; } place;

/* Which samples of an axis make the frame's sample `at`. */
static place placed(long at, long size, int half, int centred) {
    if (!half)
        return (place){samples_held(at, size), samples_held(at, size), 0.0f};
    const float where = (float)at * 0.5f - (centred ? 0.25f : 0.0f), low = floorf(where);
    return (place){samples_held((long)low, size), samples_held((long)low + 1, size), where - low};
}

PVR_OP(maps_in) {
    const uint32_t *p = call->buf[0], *k = call->push, bits = k[0], half = k[4], centred = k[5], add = k[8];
    const size_t stride = k[1], step = k[2], phase = k[3], plane_w = k[6], plane_h = k[7], lanes = k[9];
    const size_t w = k[10], h = k[11], xs = k[12], origin = k[14], x0 = p[MAPS_X0], y0 = p[MAPS_Y0];
    const size_t first = !half ? y0 : y0 / 2 > 0 ? y0 / 2 - 1 : 0;
    const uint32_t *src = call->buf[1];
    float *y = call->buf[2], scale[3], offset[3];
    for (int c = 0; c < 3; c++) {
        scale[c] = pvr_push_f32(call, 15 + c);
        offset[c] = pvr_push_f32(call, 18 + c);
    }
    size_t begin, end;
    pvr_split(team, h, &begin, &end);
    for (size_t row = begin; row < end; row++) {
        const place v = placed((long)(y0 + row), (long)plane_h, (int)half, 1);
        const void *top = src + ((size_t)v.a - first) * stride, *low = src + ((size_t)v.b - first) * stride;
        float *to = y + (origin + row * xs) * lanes;
        for (size_t x = 0; x < w; x++, to += lanes) {
            const place u = placed((long)(x0 + x), (long)plane_w, (int)half, (int)centred);
            const size_t a = (size_t)u.a * step + phase, b = (size_t)u.b * step + phase;
            float value = samples_get(top, a, bits);
            if (half) {
                const float above = value + u.share * (samples_get(top, b, bits) - value);
                const float left = samples_get(low, a, bits);
                const float below = left + u.share * (samples_get(low, b, bits) - left);
                value = above + v.share * (below - above);
            }
            for (size_t c = 0; c < lanes; c++) {
                const float one = c < 3 ? scale[c] * value + offset[c] : 0.0f;
                to[c] = add ? to[c] + one : one;
            }
        }
    }
}
