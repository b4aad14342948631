// SPDX-License-Identifier: Apache-2.0
// An invocation takes four neighbours. Grid: n / 4 over x.
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push { uint n; } push;
layout(std430, set = 0, binding = 1) buffer X { vec4 x[]; };

void main() {
    uint i = gl_GlobalInvocationID.x;
    uint width = push.n >> 2;
    if (i >= width)
        return;
    x[i] = x[(pvr_n_tokens() - 1u) * width + i];
}
