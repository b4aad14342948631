// SPDX-License-Identifier: Apache-2.0
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push {
    uint blocks, lanes, num, den, taps, residual;
    uint x_w, x_h, x_xs, x_ps, x_origin, w, h, xs, ps, origin;
} push;
layout(std430, set = 0, binding = 1) readonly buffer X { vec4 x[]; };
layout(std430, set = 0, binding = 2) readonly buffer F { float filters[]; };
layout(std430, set = 0, binding = 3) readonly buffer R { vec4 r[]; };
layout(std430, set = 0, binding = 4) writeonly buffer Y { vec4 y[]; };

// The first source sample of an output sample, before what lies outside is held to the border.
int first(uint i) {
    return int(i / push.num * push.den) + int(filters[push.num * push.taps + i % push.num]);
}

void main() {
    const uint column = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint quad = gl_GlobalInvocationID.z, quads = push.lanes / 4u;
    if (column >= push.w || row >= push.h) return;
    const uint block = quad / quads, lane = quad % quads;
    const int top = first(row), left = first(column);
    const uint down = row % push.num * push.taps, across = column % push.num * push.taps;
    vec4 sum = vec4(0.0);
    for (uint a = 0u; a < push.taps; a++) {
        const uint line = uint(clamp(top + int(a), 0, int(push.x_h) - 1));
        const uint at = block * push.x_ps + push.x_origin + line * push.x_xs;
        vec4 part = vec4(0.0);
        for (uint b = 0u; b < push.taps; b++) {
            const uint i = uint(clamp(left + int(b), 0, int(push.x_w) - 1));
            part += filters[across + b] * x[(at + i) * quads + lane];
        }
        sum += filters[down + a] * part;
    }
    const uint to = (block * push.ps + push.origin + row * push.xs + column) * quads + lane;
    y[to] = push.residual != 0u ? sum + r[to] : sum;
}
