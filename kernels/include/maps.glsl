// SPDX-License-Identifier: Apache-2.0
// What the operations on feature maps share (kernels/maps.py).
#ifndef MAPS_GLSL
#define MAPS_GLSL

const uint ACT_SLOPE = 0u, ACT_SILU = 1u, ACT_SIGMOID = 2u, ACT_GATE = 3u;
const uint X0 = 4u, Y0 = 5u, CORE_X0 = 6u, CORE_Y0 = 7u, CORE_X1 = 8u, CORE_Y1 = 9u;

// The activation of a sum; r is the residual, which the gate alone needs.
vec4 activated(uint act, vec4 v, vec4 slope, vec4 r) {
    if (act == ACT_SLOPE) return mix(slope * v, v, greaterThan(v, vec4(0.0)));
    const vec4 gate = 1.0 / (1.0 + exp(-clamp(v, vec4(-87.0), vec4(87.0))));
    if (act == ACT_SILU) return v * gate;
    return act == ACT_SIGMOID ? gate : (v + r) * (gate - 0.5);
}

#endif
