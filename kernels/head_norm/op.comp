// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a vector of a token: a head, or all of Q or K. Grid: vectors over x, tokens over
// y and z.
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push { uint heads; uint kv_heads; uint dim; float eps; uint whole; }
push;
layout(std430, set = 0, binding = 1) readonly buffer W { float w[]; };
layout(std430, set = 0, binding = 2) buffer Qkv { float qkv[]; };

shared float sums[PVR_WG_X];

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint token = pvr_token_group();
    uint vector = gl_WorkGroupID.x;
    bool whole = push.whole != 0u;
    if (token >= pvr_n_tokens() || vector >= (whole ? 2u : push.heads + push.kv_heads))
        return;
    bool key = vector >= (whole ? 1u : push.heads);
    uint size = (whole ? (key ? push.kv_heads : push.heads) : 1u) * push.dim;
    uint at = token * (push.heads + 2u * push.kv_heads) * push.dim;
    at += (whole ? vector * push.heads : vector) * push.dim;
    uint from = key ? (whole ? push.heads * push.dim : push.dim) : 0u;
    float sum = 0.0;
    for (uint i = lane; i < size; i += PVR_WG_X)
        sum += qkv[at + i] * qkv[at + i];
    sums[lane] = sum;
    barrier();
    float total = 0.0;
    for (uint i = 0u; i < PVR_WG_X; i++)
        total += sums[i];
    float factor = inversesqrt(total / float(size) + push.eps);
    for (uint i = lane; i < size; i += PVR_WG_X)
        qkv[at + i] *= factor * w[from + i];
}
