// SPDX-License-Identifier: Apache-2.0
// An invocation takes a row and 8 tokens: each weight is unpacked once for all of them. Sums are separate variables,
// since an array that a driver does not unroll would lie in memory. Grid: n over x (and z), tokens / 8 over y.
#version 450
#include "pvr.glsl"
#define WEIGHTS_BINDING 1
#include "weights.glsl"

layout(push_constant) uniform Push { uint fmt; uint n; uint k; uint accumulate; uint y0; uint ldy; } push;
layout(std430, set = 0, binding = 2) readonly buffer X { vec4 x[]; };
layout(std430, set = 0, binding = 3) buffer Y { float y[]; };

void store(uint row, uint token, float sum) {
    if (token >= pvr_n_tokens())
        return;
    uint yi = token * push.ldy + push.y0 + row;
    y[yi] = push.accumulate != 0u ? y[yi] + sum : sum;
}

void main() {
    uint group = gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint row = group * PVR_WG_X + gl_LocalInvocationID.x;
    uint token = gl_WorkGroupID.y * 8u;
    if (row >= push.n || token >= pvr_n_tokens())
        return;
    uint last = pvr_n_tokens() - 1u;  // tokens past it are read as it and not stored
    uint width = push.k >> 2;
#define FOR_TOKENS(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define BEGIN(t) uint x##t = min(token + uint(t), last) * width; float sum##t = 0.0;
    FOR_TOKENS(BEGIN)
    uint at = weights_row(row, push.k);
    for (uint block = 0u; block < push.k >> 5; block++) {
        vec2 scale = weights_scale(at);
        for (uint j = 0u; j < 4u; j++) {
            vec4 a, b;
            weights_eight(at, row, j, a, b);
            a = a * scale.x + scale.y;
            b = b * scale.x + scale.y;
            uint i = block * 8u + j * 2u;
#define STEP(t) sum##t += dot(a, x[x##t + i]) + dot(b, x[x##t + i + 1u]);
            FOR_TOKENS(STEP)
        }
        at += WEIGHTS_BLOCK;
    }
#define END(t) store(row, token + uint(t), sum##t);
    FOR_TOKENS(END)
}
