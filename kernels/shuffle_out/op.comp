// SPDX-License-Identifier: Apache-2.0
// An invocation does 4 core pixels: 4 SCALE samples of SCALE output rows, whole words of both
// depths.
#version 450
#include "pvr.glsl"
#include "video.glsl"

layout(push_constant) uniform Push {
    uint bits, scale, step, component, plane, stride, tw, th, halo, xs, x_row, f_tile, x_tile;
} push;
layout(std430, set = 0, binding = 1) readonly buffer F { vec4 f[]; };
layout(std430, set = 0, binding = 2) readonly buffer X { float x[]; };
layout(std430, set = 0, binding = 3) readonly buffer Base { float base[]; };
layout(std430, set = 0, binding = 4) buffer Dst { uint dst[]; };

const int PHASES = SCALE * SCALE, MAPS = (PHASES + 3) / 4 * 4, SAMPLES = 4 * SCALE;

// Samples of an output row, `each` of them a word, from a word of the row on.
void put(uint q[SAMPLES], uint line, uint word, const int each) {
    for (int w = 0; w < SAMPLES / each; w++) {
        uint packed = 0u;
        for (int j = 0; j < each; j++)
            packed |= q[w * each + j] << ((j * push.step + push.component) * push.bits);
        if (word + w >= push.stride) return;
        const uint at = line * push.stride + word + w;
        // The second component of a pair joins the first, which came before it.
        dst[at] = push.component == 0u ? packed : dst[at] | packed;
    }
}

void main() {
    const uint xv = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint tile = gl_GlobalInvocationID.z;
    const uint left = (pvr_param(COL0) + tile) * push.tw + 4u * xv;
    const uint width = pvr_param(push.plane), height = pvr_param(push.plane + 1u);
    if (4u * xv >= push.tw || tile >= pvr_n_tokens()) return;
    if (left >= width || pvr_param(push.plane + 2u) + row >= height) return;

    const float top = push.bits == 8u ? 255.0 : 65535.0;
    const uint maps = (tile * push.f_tile + row * MAPS * push.xs) / 4u + xv;
    // An output row at a time: more sums than a row's would not stay in registers.
    for (int a = 0; a < SCALE; a++) {
        vec4 acc[SCALE];
        for (int b = 0; b < SCALE; b++) acc[b] = vec4(0.0);
        for (uint i = 0u; i < 5u; i++) {
            const uint line = row + push.halo - 2u + i;
            const uint at = tile * push.x_tile + line * push.x_row + push.halo - 2u + 4u * xv;
            float s[8];
            for (uint j = 0u; j < 8u; j++) s[j] = x[at + j];
            for (int j = 0; j < 5; j++) {
                const vec4 v = vec4(s[j], s[j + 1], s[j + 2], s[j + 3]);
                for (int b = 0; b < SCALE; b++)
                    acc[b] += base[25 * (SCALE * a + b) + 5 * i + j] * v;
            }
        }
        for (int b = 0; b < SCALE; b++)
            acc[b] = (acc[b] + f[maps + (SCALE * a + b) * (push.xs / 4u)]) * top;
        uint q[SAMPLES];
        for (int i = 0; i < SAMPLES; i++)
            q[i] = quantise(acc[i % SCALE][i / SCALE], top);
        const uint line = SCALE * row + a, each = 32u / push.bits / push.step;
        const uint word = left * SCALE / each;
        if (each == 4u) put(q, line, word, 4);
        else if (each == 2u) put(q, line, word, 2);
        else put(q, line, word, 1);
    }
}
