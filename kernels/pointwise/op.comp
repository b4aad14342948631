// SPDX-License-Identifier: Apache-2.0
#version 450
#include "pvr.glsl"
#include "maps.glsl"

layout(push_constant) uniform Push { uint blocks, lanes, mode, act, w, h, xs, ps, origin; } push;
layout(std430, set = 0, binding = 1) readonly buffer A { vec4 a[]; };
layout(std430, set = 0, binding = 2) readonly buffer B { vec4 b[]; };
layout(std430, set = 0, binding = 3) readonly buffer W { vec4 w[]; };
layout(std430, set = 0, binding = 4) writeonly buffer Y { vec4 y[]; };

const uint SUM = 1u, PRODUCT = 2u;

void main() {
    const uint x = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint quad = gl_GlobalInvocationID.z, quads = push.lanes / 4u;
    if (x >= push.w || row >= push.h) return;
    const uint all = push.blocks * quads;
    const uint i = (quad / quads * push.ps + push.origin + row * push.xs + x) * quads + quad % quads;
    vec4 v = w[quad] * a[i] + w[all + quad];
    if (push.mode == SUM) v += w[2u * all + quad] * b[i];
    else if (push.mode == PRODUCT) v *= b[i];
    y[i] = activated(push.act, v, w[3u * all + quad], vec4(0.0));
}
