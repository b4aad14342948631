/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PVR_ROPE_H
#define PVR_ROPE_H

#include <stddef.h>

/* Turns the pairs of a head (kernels/rope_kv/op.py) by a row of the table. */
static inline void rope_turn(float *x, const float *cos_sin, size_t half, int neox) {
    for (size_t j = 0; j < half; j++) {
        float *a = neox ? x + j : x + 2 * j, *b = neox ? a + half : a + 1;
        const float c = cos_sin[2 * j], s = cos_sin[2 * j + 1], u = *a, v = *b;
        *a = u * c - v * s;
        *b = u * s + v * c;
    }
}

#endif
