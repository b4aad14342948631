// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a token. Grid: tokens over x and y (1 with `last`).
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push { uint k; float eps; uint last; uint add; } push;
layout(std430, set = 0, binding = 1) readonly buffer X { float x[]; };
layout(std430, set = 0, binding = 2) readonly buffer W { float w[]; };
layout(std430, set = 0, binding = 3) buffer Y { float y[]; };

#if defined(WIDE)
#include "wide.glsl"
#else
shared float sums[PVR_WG_X];
#endif

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
#if defined(WIDE)
    float total = wide_sum(sum);
#else
    sums[lane] = sum;
    barrier();
    float total = 0.0;
    for (uint i = 0u; i < PVR_WG_X; i++)
        total += sums[i];
#endif
    float factor = inversesqrt(total / float(push.k) + push.eps);
    for (uint i = lane; i < push.k; i += PVR_WG_X) {
        float v = x[from * push.k + i] * factor * w[i];
        y[row * push.k + i] = push.add != 0u ? y[row * push.k + i] + v : v;
    }
}
