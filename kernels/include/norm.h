/* SPDX-License-Identifier: Apache-2.0 */
/* The root mean square that a vector is divided by (kernels/rmsnorm/op.py). */
#ifndef PVR_NORM_H
#define PVR_NORM_H

#include <math.h>

#include "lanes.h"

/* 1 / sqrt(mean(x^2) + eps). */
static inline float norm_factor(const float *x, size_t k, float eps) {
    vf sum = vf_set1(0), sum2 = vf_set1(0);
    size_t i = 0;
    for (; i + 2 * LANES <= k; i += 2 * LANES) {
        vf a = vf_load(x + i), b = vf_load(x + i + LANES);
        sum = vf_fma(a, a, sum);
        sum2 = vf_fma(b, b, sum2);
    }
    for (; i < k; i += LANES) {
        vf a = vf_load_n(x + i, k - i);
        sum = vf_fma(a, a, sum);
    }
    return 1.0f / sqrtf(vf_sum(vf_add(sum, sum2)) / (float)k + eps);
}

#endif
