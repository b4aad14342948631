// SPDX-License-Identifier: Apache-2.0
// An invocation takes a row. Grid: n over x, and over y where x would pass 65535 groups.
#version 450
#include "pvr.glsl"
#define WEIGHTS_BINDING 1
#include "weights.glsl"

layout(push_constant) uniform Push { uint fmt; uint n; uint k; uint accumulate; uint y0; } push;
layout(std430, set = 0, binding = 2) readonly buffer X { vec4 x[]; };
layout(std430, set = 0, binding = 3) buffer Y { float y[]; };

void main() {
    uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint row = group * PVR_WG_X + gl_LocalInvocationID.x;
    if (row >= push.n)
        return;
    uint at = weights_row(row, push.k);
    uint xi = 0u;
    float sum = 0.0;
    for (uint block = 0u; block < push.k >> 5; block++) {
        vec4 products = vec4(0.0), ones = vec4(0.0);
        for (uint j = 0u; j < 4u; j++) {
            vec4 a, b;
            weights_eight(at, row, j, a, b);
            vec4 xa = x[xi], xb = x[xi + 1u];
            products += a * xa + b * xb;
#if WEIGHTS_MINIMUM
            ones += xa + xb;
#endif
            xi += 2u;
        }
        vec2 scale = weights_scale(at);
        sum += scale.x * dot(products, vec4(1.0));
#if WEIGHTS_MINIMUM
        sum += scale.y * dot(ones, vec4(1.0));
#endif
        at += WEIGHTS_BLOCK;
    }
    uint yi = push.y0 + row;
    y[yi] = push.accumulate != 0u ? y[yi] + sum : sum;
}
