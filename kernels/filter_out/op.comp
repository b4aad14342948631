// SPDX-License-Identifier: Apache-2.0
// An invocation does one word of both output rows of an input row.
#version 450
#include "pvr.glsl"
#include "video.glsl"

layout(push_constant) uniform Push { uint bits, step, stride, out_stride, rows, words; } push;
layout(std430, set = 0, binding = 1) readonly buffer Src { uint src[]; };
layout(std430, set = 0, binding = 2) readonly buffer Filters { float filters[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Dst { uint dst[]; };

void main() {
    const uint word = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint each = push.bits == 8u ? 4u : 2u, width = pvr_param(C_WIDTH);
    if (row >= pvr_param(C_ROWS) || word >= push.out_stride) return;
    if (word * each >= 2u * width * push.step) return;

    const float top = push.bits == 8u ? 255.0 : 65535.0;
    const int last_x = int(width) - 1, last_y = int(pvr_param(C_HEIGHT)) - 1;
    uint upper = 0u, lower = 0u;
    for (uint i = 0u; i < each; i++) {
        const uint s = word * each + i, wide = s / push.step, c = s % push.step;
        const int x = int(wide >> 1);
        const uint phase = 25u * (wide & 1u);
        float a = 0.0, b = 0.0;
        for (int t = 0; t < 5; t++) {
            const int fy = clamp(int(pvr_param(C_BAND_Y) + row) + t - 2, 0, last_y);
            const uint line = (uint(fy) - pvr_param(C_SRC_Y)) * push.stride;
            for (int j = 0; j < 5; j++) {
                const uint at = uint(clamp(x + j - 2, 0, last_x)) * push.step + c;
                const float v = float(sample_of(src[line + word_at(at, push.bits)], at, push.bits));
                a += filters[phase + 5 * t + j] * v;
                b += filters[phase + 50u + 5 * t + j] * v;
            }
        }
        const uint shift = i * (32u / each);
        upper |= quantise(a, top) << shift;
        lower |= quantise(b, top) << shift;
    }
    dst[2u * row * push.out_stride + word] = upper;
    dst[(2u * row + 1u) * push.out_stride + word] = lower;
}
