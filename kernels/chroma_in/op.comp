// SPDX-License-Identifier: Apache-2.0
// An invocation does 4 pixels of a row: their chroma and the 16 luma samples around.
#version 450
#include "pvr.glsl"
#include "video.glsl"

layout(push_constant) uniform Push {
    uint bits, step, component, stride, luma_stride, tw, th, halo, xs, y_tile;
    float scale;
} push;
layout(std430, set = 0, binding = 1) readonly buffer Src { uint src[]; };
layout(std430, set = 0, binding = 2) readonly buffer Luma { uint luma[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Y { vec4 y[]; };

void main() {
    const uint xv = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint tile = gl_GlobalInvocationID.z, xs4 = push.xs / 4u;
    if (xv >= xs4 || tile >= pvr_n_tokens()) return;
    const int m = clamp(int(pvr_param(C_BAND_Y) + row) - int(push.halo), 0,
                        int(pvr_param(C_HEIGHT)) - 1);
    const int x0 = int((pvr_param(COL0) + tile) * push.tw + 4u * xv) - int(push.halo);
    const uint line = (uint(m) - pvr_param(C_SRC_Y)) * push.stride;
    const uint last_x = pvr_param(WIDTH) - 1u, last_y = pvr_param(HEIGHT) - 1u;
    vec4 v[5];
    for (int i = 0; i < 4; i++) {
        const uint n = uint(clamp(x0 + i, 0, int(pvr_param(C_WIDTH)) - 1));
        const uint at = n * push.step + push.component;
        v[0][i] = float(sample_of(src[line + word_at(at, push.bits)], at, push.bits));
        for (uint a = 0u; a < 2u; a++) {
            const uint ly = min(2u * uint(m) + a, last_y) - pvr_param(SRC_Y);
            for (uint b = 0u; b < 2u; b++) {
                const uint lx = min(2u * n + b, last_x);
                const uint word = luma[ly * push.luma_stride + word_at(lx, push.bits)];
                v[1u + 2u * a + b][i] = float(sample_of(word, lx, push.bits));
            }
        }
    }
    const uint out4 = tile * push.y_tile / 4u + row * 5u * xs4 + xv;
    for (uint c = 0u; c < 5u; c++) y[out4 + c * xs4] = push.scale * v[c];
}
