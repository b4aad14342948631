// SPDX-License-Identifier: Apache-2.0
// An invocation unpacks four neighbours of a row. Grid: k / 4 over x, tokens over y and z.
#version 450
#include "pvr.glsl"
#define WEIGHTS_BINDING 2
#include "weights.glsl"

layout(push_constant) uniform Push { uint fmt; uint k; uint row0; uint rows; float scale; }
push;
layout(std430, set = 0, binding = 1) readonly buffer Ids { uint ids[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Out { vec4 result[]; };

void main() {
    uint quad = gl_GlobalInvocationID.x;
    uint token = pvr_token_group();
    if (token >= pvr_n_tokens() || quad >= push.k >> 2)
        return;
    uint row = ids[token] - push.row0;  // wraps below row0, and is then beyond rows
    if (row >= push.rows)
        return;
    uint at = weights_row(row, push.k) + (quad >> 3) * WEIGHTS_BLOCK;
    vec2 scale = weights_scale(at);
    vec4 a, b;
    weights_eight(at, row, (quad & 7u) >> 1, a, b);
    vec4 value = ((quad & 1u) == 0u ? a : b) * scale.x + scale.y;
    result[token * (push.k >> 2) + quad] = push.scale * value;
}
