/* SPDX-License-Identifier: Apache-2.0 */
/* What the operations on feature maps share in C (kernels/maps.py). */
#ifndef PVR_MAPS_H
#define PVR_MAPS_H

#include "lanes.h"

enum maps_act { MAPS_SLOPE = 0, MAPS_SILU = 1, MAPS_SIGMOID = 2, MAPS_GATE = 3 };
enum maps_lanes { MAPS_THIN = 4, MAPS_WIDE = 16 };
enum maps_param {
    MAPS_X0 = 4, MAPS_Y0 = 5,
    MAPS_CORE_X0 = 6, MAPS_CORE_Y0 = 7, MAPS_CORE_X1 = 8, MAPS_CORE_Y1 = 9,
};

PVR_INLINE vf maps_sigmoid(vf v) {
    const vf one = vf_set1(1.0f);
    return vf_div(one, vf_add(one, vf_exp(vf_sub(vf_set1(0.0f), v))));
}

/* The activation of a sum; r is the residual, which the gate alone needs. */
PVR_INLINE vf maps_activated(uint32_t act, vf v, vf slope, vf r) {
    const vf zero = vf_set1(0.0f);
    switch (act) {
    case MAPS_SLOPE: return vf_fma(slope, vf_min(v, zero), vf_max(v, zero));
    case MAPS_SILU: return vf_mul(v, maps_sigmoid(v));
    case MAPS_SIGMOID: return maps_sigmoid(v);
    default: return vf_mul(vf_add(v, r), vf_sub(maps_sigmoid(v), vf_set1(0.5f)));
    }
}

#endif
