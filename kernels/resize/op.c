/* SPDX-License-Identifier: Apache-2.0 */
/* A thread takes output rows: the taps of all columns are made down the rows first, then across. */
#include "maps.h"

static size_t clamped(long i, size_t n) {
    return i < 0 ? 0 : (size_t)i >= n ? n - 1 : (size_t)i;
}

PVR_OP(resize) {
    const uint32_t *k = call->push, residual = k[5];
    const size_t blocks = k[0], lanes = k[1], num = k[2], den = k[3], taps = k[4];
    const size_t xw = k[6], xh = k[7], x_xs = k[8], x_ps = k[9], x_origin = k[10];
    const size_t w = k[11], h = k[12], xs = k[13], ps = k[14], origin = k[15];
    const float *x = call->buf[1], *filters = call->buf[2], *r = call->buf[3], *start = filters + num * taps;
    float *y = call->buf[4];
    const size_t each = xw * lanes + LANES;
    float *scratch = pvr_scratch(team, sizeof(float) * each * (size_t)team->n);
    if (!scratch)
        return;
    float *tall = scratch + each * (size_t)team->tid;
    size_t begin, end;
    pvr_split(team, blocks * h, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t block = i / h, row = i % h;
        const float *from = x + (block * x_ps + x_origin) * lanes, *weight = filters + row % num * taps;
        const long top = (long)(row / num * den) + (long)start[row % num];
        for (size_t j = 0; j < xw * lanes; j += LANES) {
            const size_t left = xw * lanes - j;
            vf v = vf_set1(0.0f);
            for (size_t t = 0; t < taps; t++) {
                const float *line = from + clamped(top + (long)t, xh) * x_xs * lanes;
                v = vf_fma(vf_set1(weight[t]), vf_load_n(line + j, left), v);
            }
            vf_store(tall + j, v);
        }
        const size_t at = (block * ps + origin + row * xs) * lanes;
        for (size_t c = 0; c < w; c++) {
            const size_t p = c % num;
            const long first = (long)(c / num * den) + (long)start[p];
            vf v = residual ? vf_load_n(r + at + c * lanes, lanes) : vf_set1(0.0f);
            for (size_t t = 0; t < taps; t++) {
                const float *s = tall + clamped(first + (long)t, xw) * lanes;
                v = vf_fma(vf_set1(filters[p * taps + t]), vf_load_n(s, lanes), v);
            }
            vf_store_n(y + at + c * lanes, v, lanes);
        }
    }
}
