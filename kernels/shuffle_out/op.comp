// SPDX-License-Identifier: Apache-2.0
// An invocation does 4 core pixels: 8 samples of two output rows, whole words of both depths.
#version 450
#include "pvr.glsl"
#include "video.glsl"

layout(push_constant) uniform Push { uint bits, stride, tw, th, halo, xs, f_tile, luma_tile; } push;
layout(std430, set = 0, binding = 1) readonly buffer F { vec4 f[]; };
layout(std430, set = 0, binding = 2) readonly buffer Luma { float luma[]; };
layout(std430, set = 0, binding = 3) readonly buffer Base { float base[]; };
layout(std430, set = 0, binding = 4) writeonly buffer Dst { uint dst[]; };

void put(uint row, uint word, uint value) {
    if (word < push.stride) dst[row * push.stride + word] = value;
}

void main() {
    const uint xv = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint tile = gl_GlobalInvocationID.z;
    const uint left = (pvr_param(COL0) + tile) * push.tw + 4u * xv;
    if (4u * xv >= push.tw || tile >= pvr_n_tokens()) return;
    if (left >= pvr_param(WIDTH) || pvr_param(BAND_Y) + row >= pvr_param(HEIGHT)) return;

    vec4 acc[4] = vec4[4](vec4(0.0), vec4(0.0), vec4(0.0), vec4(0.0));
    for (uint i = 0u; i < 5u; i++) {
        const uint line = row + push.halo - 2u + i;
        const uint at = tile * push.luma_tile + line * push.xs + push.halo - 2u + 4u * xv;
        float s[8];
        for (uint j = 0u; j < 8u; j++) s[j] = luma[at + j];
        for (int j = 0; j < 5; j++) {
            const vec4 v = vec4(s[j], s[j + 1], s[j + 2], s[j + 3]);
            for (int p = 0; p < 4; p++) acc[p] += base[25 * p + 5 * i + j] * v;
        }
    }
    const float top = push.bits == 8u ? 255.0 : 65535.0;
    const uint maps = (tile * push.f_tile + row * 4u * push.xs) / 4u + xv;
    for (int p = 0; p < 4; p++) acc[p] = (acc[p] + f[maps + p * (push.xs / 4u)]) * top;
    for (int a = 0; a < 2; a++) {
        const vec4 even = acc[2 * a], odd = acc[2 * a + 1];
        const uint line = 2u * row + a;
        if (push.bits == 8u) {
            for (int i = 0; i < 4; i += 2)
                put(line, left / 2u + i / 2,
                    quantise(even[i], top) | quantise(odd[i], top) << 8
                    | quantise(even[i + 1], top) << 16 | quantise(odd[i + 1], top) << 24);
        } else {
            for (int i = 0; i < 4; i++)
                put(line, left + i, quantise(even[i], top) | quantise(odd[i], top) << 16);
        }
    }
}
