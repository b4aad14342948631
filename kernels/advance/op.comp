// SPDX-License-Identifier: Apache-2.0
// One workgroup. What it writes over is read through the same binding: as a uniform it would be
// taken for constant.
#version 450
#include "pvr.glsl"

layout(std430, set = 0, binding = 1) readonly buffer Record { uint record[]; };
layout(std430, set = 0, binding = 2) buffer Next { uint next[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Ids { uint ids[]; };
layout(std430, set = 0, binding = 4) writeonly buffer Records { uint records[]; };

const uint POS0 = 1u, STEP = 3u, RECORD_WORDS = 130u, STRIDE = 192u, MOST = 16u;

void main() {
    uint lane = gl_LocalInvocationID.x, step = next[STEP];
    for (uint i = lane; i < RECORD_WORDS; i += PVR_WG_X)
        records[STRIDE * (step % MOST) + i] = record[i];
    barrier();  // all have read the step
    if (lane == 0u) {
        ids[0] = record[0];
        next[POS0] += 1u;
        next[STEP] = step + 1u;
    }
}
