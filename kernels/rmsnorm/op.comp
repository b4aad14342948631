// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a token. Grid: tokens over x and y (1 with `last`).
// With WIDE an invocation asks for all that it needs of rows of up to 4096 before it adds anything
// up: a row takes about as long as one access to memory does.
#version 450
#if defined(WIDE)
#extension GL_EXT_control_flow_attributes : require
#endif
#include "pvr.glsl"

layout(push_constant) uniform Push { uint k; float eps; uint last; uint add; } push;

#if defined(WIDE)

#include "wide.glsl"
layout(std430, set = 0, binding = 1) readonly buffer X { vec4 x[]; };
layout(std430, set = 0, binding = 2) readonly buffer W { vec4 w[]; };
layout(std430, set = 0, binding = 3) buffer Y { vec4 y[]; };

const uint HELD = 4u;

void put(uint i, vec4 v) { y[i] = push.add != 0u ? y[i] + v : v; }

void main() {
    uint lane = gl_LocalInvocationID.x, fours = push.k >> 2;
    uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (push.last == 0u && row >= pvr_n_tokens())
        return;
    uint from = (push.last != 0u ? pvr_last_row() : row) * fours, to = row * fours;
    vec4 held[HELD], weight[HELD];
    [[unroll]] for (uint j = 0u; j < HELD; j++) {
        uint i = lane + j * PVR_WG_X;
        held[j] = i < fours ? x[from + i] : vec4(0.0);
        weight[j] = i < fours ? w[i] : vec4(0.0);
    }
    float sum = 0.0;
    [[unroll]] for (uint j = 0u; j < HELD; j++)
        sum += dot(held[j], held[j]);
    for (uint i = lane + HELD * PVR_WG_X; i < fours; i += PVR_WG_X)
        sum += dot(x[from + i], x[from + i]);
    float factor = inversesqrt(wide_sum(sum) / float(push.k) + push.eps);
    [[unroll]] for (uint j = 0u; j < HELD; j++) {
        uint i = lane + j * PVR_WG_X;
        if (i < fours)
            put(to + i, held[j] * factor * weight[j]);
    }
    for (uint i = lane + HELD * PVR_WG_X; i < fours; i += PVR_WG_X)
        put(to + i, x[from + i] * factor * w[i]);
}

#else

layout(std430, set = 0, binding = 1) readonly buffer X { float x[]; };
layout(std430, set = 0, binding = 2) readonly buffer W { float w[]; };
layout(std430, set = 0, binding = 3) buffer Y { float y[]; };
shared float sums[PVR_WG_X];

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint from = push.last != 0u ? pvr_last_row() : row;
    if (push.last == 0u && row >= pvr_n_tokens())
        return;
    float sum = 0.0;
    for (uint i = lane; i < push.k; i += PVR_WG_X) {
        float v = x[from * push.k + i];
        sum += v * v;
    }
    sums[lane] = sum;
    barrier();
    float total = 0.0;
    for (uint i = 0u; i < PVR_WG_X; i++)
        total += sums[i];
    float factor = inversesqrt(total / float(push.k) + push.eps);
    for (uint i = lane; i < push.k; i += PVR_WG_X) {
        float v = x[from * push.k + i] * factor * w[i];
        y[row * push.k + i] = push.add != 0u ? y[row * push.k + i] + v : v;
    }
}

#endif
