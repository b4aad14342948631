/* SPDX-License-Identifier: Apache-2.0 */
/* A video result against its input: what engine/video/plain.py judges tiles by. */
#include <math.h>
#include <stdint.h>

#include "pvr.h"

static inline float sample(const char *row, int bytes, int64_t x) {
    return bytes == 1 ? (float)((const uint8_t *)row)[x] : (float)((const uint16_t *)row)[x];
}

void pvr_held(const char *low, int64_t low_row, const char *high, int64_t high_row, int bytes, uint32_t height,
              uint32_t width, uint32_t scale, uint32_t sparse, const int64_t *firsts, uint32_t tiles, double *sums) {
    /* The first sample of a pixel lies so much nearer to the neighbours above and beside. */
    const float near_by = (float)(scale - 1) / (float)(2 * scale);
    for (uint32_t t = 0; t < 3 * tiles; t++)
        sums[t] = 0.0;
    for (int64_t y = 0; y < height; y += sparse) {
        const char *mid = low + y * low_row, *above = y ? mid - low_row : mid;
        const char *below = y + 1 < height ? mid + low_row : mid, *result = high + (int64_t)scale * y * high_row;
        for (uint32_t t = 0; t < tiles; t++) {
            const int64_t end = t + 1 < tiles ? firsts[t + 1] * sparse : width;
            float error = 0.0f, size = 0.0f, steps = 0.0f;
            for (int64_t x = firsts[t] * sparse; x < end; x += sparse) {
                const int64_t left = x ? x - 1 : 0, right = x + 1 < width ? x + 1 : x;
                const float m = sample(mid, bytes, x), a = sample(above, bytes, x), b = sample(mid, bytes, left);
                const float up = m + near_by * (a - m);
                const float across = b + near_by * (sample(above, bytes, left) - b);
                const float off = sample(result, bytes, scale * x) - (up + near_by * (across - up));
                error += off;
                size += fabsf(off);
                steps += fabsf(a - m) + fabsf(b - m) + fabsf(sample(below, bytes, x) - m) +
                         fabsf(sample(mid, bytes, right) - m);
            }
            sums[t] += error;
            sums[tiles + t] += size;
            sums[2 * tiles + t] += steps;
        }
    }
}
