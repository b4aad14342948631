// SPDX-License-Identifier: Apache-2.0
// The gated unit: act(gate) * up, act 0 SiLU, 1 GELU by tanh (kernels/swiglu/op.py).
#ifndef PVR_GLU_GLSL
#define PVR_GLU_GLSL

vec4 glu(vec4 gate, vec4 up, uint act) {
    vec4 z = act == 0u ? gate : 1.5957691216 * (gate + 0.044715 * gate * gate * gate);
    // exp stays finite: an infinite one times 0 would be no number, and gate / inf is 0 anyway.
    return gate / (1.0 + exp(min(-z, 87.0))) * up;
}

#endif
