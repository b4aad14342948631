// SPDX-License-Identifier: Apache-2.0
// An invocation takes four neighbours. Grid: n / 4 over x, tokens over y and z.
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push { uint n; } push;
layout(std430, set = 0, binding = 1) readonly buffer G { float g[]; };
layout(std430, set = 0, binding = 2) buffer Y { vec4 y[]; };

void main() {
    uint i = gl_GlobalInvocationID.x;
    uint token = pvr_token_group();
    uint width = push.n >> 2;
    if (token >= pvr_n_tokens() || i >= width)
        return;
    // Below -80 the sigmoid is nothing, and exp() would leave float32.
    y[token * width + i] *= 1.0 / (1.0 + exp(-max(g[token], -80.0)));
}
