// SPDX-License-Identifier: Apache-2.0
// An invocation does 4 pixels of one channel.
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push { uint channels, rows, offset, xs, tile; } push;
layout(std430, set = 0, binding = 1) readonly buffer Kept { float kept[]; };
layout(std430, set = 0, binding = 2) readonly buffer Slope { float slope[]; };
layout(std430, set = 0, binding = 3) buffer Y { vec4 y[]; };

void main() {
    const uint i = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint tile = gl_GlobalInvocationID.z, width = push.channels * push.xs;
    if (4u * i >= width || tile >= pvr_n_tokens()) return;
    const uint from = tile * push.tile + (row + push.offset) * width + push.offset + 4u * i;
    const uint at = (tile * push.tile + row * width) / 4u + i;
    const vec4 sum = y[at] + vec4(kept[from], kept[from + 1u], kept[from + 2u], kept[from + 3u]);
    const float k = slope[4u * i / push.xs];
    y[at] = mix(k * sum, sum, greaterThan(sum, vec4(0.0)));
}
