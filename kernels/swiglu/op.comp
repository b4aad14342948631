// SPDX-License-Identifier: Apache-2.0
// An invocation takes four neighbours. Grid: f / 4 over x, tokens over y and z.
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push { uint f; } push;
layout(std430, set = 0, binding = 1) readonly buffer Gu { vec4 gu[]; };
layout(std430, set = 0, binding = 2) writeonly buffer H { vec4 h[]; };

void main() {
    uint i = gl_GlobalInvocationID.x;
    uint token = pvr_token_group();
    uint width = push.f >> 2;
    if (token >= pvr_n_tokens() || i >= width)
        return;
    vec4 gate = gu[token * 2u * width + i];
    vec4 up = gu[(token * 2u + 1u) * width + i];
    // exp stays finite: an infinite one times 0 would be no number, and gate / inf is 0 anyway.
    h[token * width + i] = gate / (1.0 + exp(min(-gate, 87.0))) * up;
}
