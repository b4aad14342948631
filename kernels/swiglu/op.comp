// SPDX-License-Identifier: Apache-2.0
// An invocation takes four neighbours. Grid: f / 4 over x, rows (tokens times `each`) over y and z.
#version 450
#include "pvr.glsl"
#include "glu.glsl"

layout(push_constant) uniform Push { uint f; uint act; uint each; } push;
layout(std430, set = 0, binding = 1) readonly buffer Gu { vec4 gu[]; };
layout(std430, set = 0, binding = 2) writeonly buffer H { vec4 h[]; };

void main() {
    uint i = gl_GlobalInvocationID.x;
    uint row = pvr_token_group();
    uint width = push.f >> 2;
    if (row >= pvr_n_tokens() * push.each || i >= width)
        return;
    vec4 gate = gu[row * 2u * width + i];
    vec4 up = gu[(row * 2u + 1u) * width + i];
    h[row * width + i] = glu(gate, up, push.act);
}
