// SPDX-License-Identifier: Apache-2.0
#version 450
#include "pvr.glsl"
#include "video.glsl"

layout(push_constant) uniform Push {
    uint bits, stride, tw, th, halo, xs, y_tile;
    float scale;
} push;
layout(std430, set = 0, binding = 1) readonly buffer Src { uint src[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Y { vec4 y[]; };

void main() {
    const uint xv = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint tile = gl_GlobalInvocationID.z;
    if (xv >= push.xs / 4u || tile >= pvr_n_tokens()) return;
    const int last_y = int(pvr_param(HEIGHT)) - 1;
    const int fy = clamp(int(pvr_param(BAND_Y) + row) - int(push.halo), 0, last_y);
    const uint line = (uint(fy) - pvr_param(SRC_Y)) * push.stride;
    const int x0 = int((pvr_param(COL0) + tile) * push.tw + 4u * xv) - int(push.halo);
    const int last = int(pvr_param(WIDTH)) - 1;
    vec4 v;
    for (int i = 0; i < 4; i++) {
        const uint x = uint(clamp(x0 + i, 0, last));
        v[i] = push.scale * float(sample_of(src[line + word_at(x, push.bits)], x, push.bits));
    }
    y[(tile * push.y_tile + row * push.xs) / 4u + xv] = v;
}
