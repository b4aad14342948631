/* SPDX-License-Identifier: Apache-2.0 */
/* Down first, over whole rows; then across, a pixel at a time. */
#include "video.h"

/* Adds weight times a row of samples. */
static void add_row(float *line, const void *row, int bits, size_t n, float weight) {
    if (bits == 8) {
        const uint8_t *s = row;
        for (size_t x = 0; x < n; x++) line[x] += weight * s[x];
    } else {
        const uint16_t *s = row;
        for (size_t x = 0; x < n; x++) line[x] += weight * s[x];
    }
}

/* A row across, by filters of so many taps. */
static inline __attribute__((always_inline)) void across_row(
    const size_t taps, const size_t step, const int bits, const uint32_t *records,
    const float *line, void *dst, size_t width) {
    const float top = bits == 8 ? 255.0f : 65535.0f;
    for (size_t x = 0; x < width; x++) {
        const uint32_t *record = records + x * (taps + 1);
        const float *w = (const float *)record + 1, *s = line + record[0] * step;
        for (size_t c = 0; c < step; c++) {
            float sum = 0.0f;
            for (size_t j = 0; j < taps; j++) sum += w[j] * s[j * step + c];
            const int v = pvr_quantise(sum, top);
            if (bits == 8) ((uint8_t *)dst)[x * step + c] = (uint8_t)v;
            else ((uint16_t *)dst)[x * step + c] = (uint16_t)v;
        }
    }
}

PVR_OP(resample) {
    const uint32_t *k = call->push;
    const int bits = (int)k[0];
    const size_t step = k[1], stride = k[3], out_stride = k[4], width = k[5];
    const size_t taps_down = k[6], taps_across = k[7];
    const uint32_t *frame = (const uint32_t *)call->buf[0] + k[2];
    const size_t samples = frame[0] * step, out_y = frame[2], src_y = frame[3], rows = frame[4];
    const uint32_t *down = call->buf[2], *across = call->buf[3];
    float *lines = pvr_scratch(team, (size_t)team->n * samples * sizeof(float));
    if (!lines) return;
    float *line = lines + (size_t)team->tid * samples;
    size_t begin, end;
    pvr_split(team, rows, &begin, &end);
    for (size_t row = begin; row < end; row++) {
        const uint32_t *rec = down + (out_y + row) * (taps_down + 1);
        for (size_t x = 0; x < samples; x++) line[x] = 0.0f;
        for (size_t i = 0; i < taps_down; i++) {
            const uint32_t *src = (const uint32_t *)call->buf[1] + (rec[0] - src_y + i) * stride;
            add_row(line, src, bits, samples, ((const float *)rec)[1 + i]);
        }
        uint32_t *dst = (uint32_t *)call->buf[4] + row * out_stride;
        /* Cubic interpolation, which has to be quick, has four taps. */
        if (taps_across == 4 && step == 1 && bits == 8)
            across_row(4, 1, 8, across, line, dst, width);
        else across_row(taps_across, step, bits, across, line, dst, width);
    }
}
