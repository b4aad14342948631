/* SPDX-License-Identifier: Apache-2.0 */
/* The gated unit: h = act(gate) * up, act 0 SiLU, 1 GELU by tanh (kernels/swiglu/op.py). */
#ifndef PVR_GLU_H
#define PVR_GLU_H

#include "lanes.h"

/* Of the next 16 elements, or of n where those are fewer. */
PVR_INLINE void glu(const float *gate, const float *up, float *h, size_t n, uint32_t act) {
    const vf one = vf_set1(1), g = vf_load_n(gate, n);
    vf z = g;
    if (act) { /* GELU: 2 sqrt(2 / pi) (g + 0.044715 g^3) */
        vf inner = vf_fma(vf_mul(g, g), vf_set1(0.0713548163f), vf_set1(1.5957691216f));
        z = vf_mul(g, inner);
    }
    const vf sigmoid = vf_div(one, vf_add(one, vf_exp(vf_sub(vf_set1(0), z))));
    vf_store_n(h, vf_mul(vf_mul(g, sigmoid), vf_load_n(up, n)), n);
}

#endif
