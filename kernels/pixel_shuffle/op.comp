// SPDX-License-Identifier: Apache-2.0
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push {
    uint blocks, lanes, xl, channels, s, down, cs, as, bs;
    uint x_w, x_h, x_xs, x_ps, x_origin, w, h, xs, ps, origin;
} push;
layout(std430, set = 0, binding = 1) readonly buffer X { float x[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Y { vec4 y[]; };

float at(uint c, uint row, uint column) {
    const uint pixel = c / push.xl * push.x_ps + push.x_origin + row * push.x_xs + column;
    return x[pixel * push.xl + c % push.xl];
}

void main() {
    const uint column = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint quad = gl_GlobalInvocationID.z, quads = push.lanes / 4u, s = push.s;
    if (column >= push.w || row >= push.h) return;
    vec4 v = vec4(0.0);
    for (uint l = 0u; l < 4u; l++) {
        const uint d = 4u * quad + l;
        if (push.down != 0u) {
            if (d >= push.channels * s * s) break;
            const uint c = d / push.cs % push.channels, a = d / push.as % s, b = d / push.bs % s;
            v[l] = at(c, row * s + a, column * s + b);
        } else {
            if (d >= push.channels) break;
            const uint c = d * push.cs + row % s * push.as + column % s * push.bs;
            v[l] = at(c, row / s, column / s);
        }
    }
    y[(quad / quads * push.ps + push.origin + row * push.xs + column) * quads + quad % quads] = v;
}
