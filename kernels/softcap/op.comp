// SPDX-License-Identifier: Apache-2.0
// An invocation takes an element. Grid: n over x and y.
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push { uint n; float cap; } push;
layout(std430, set = 0, binding = 1) buffer X { float x[]; };

void main() {
    uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint i = group * PVR_WG_X + gl_LocalInvocationID.x;
    if (i >= push.n)
        return;
    // By way of exp, which some drivers' tanh does not keep finite; beyond 20 both are 1.
    float z = exp(2.0 * clamp(x[i] / push.cap, -20.0, 20.0));
    x[i] = push.cap * (1.0 - 2.0 / (z + 1.0));
}
