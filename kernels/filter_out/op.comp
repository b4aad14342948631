// SPDX-License-Identifier: Apache-2.0
// An invocation does one word of an output row.
#version 450
#include "pvr.glsl"
#include "video.glsl"

layout(push_constant) uniform Push {
    uint bits, step, scale, stride, out_stride, rows, words;
} push;
layout(std430, set = 0, binding = 1) readonly buffer Src { uint src[]; };
layout(std430, set = 0, binding = 2) readonly buffer Filters { float filters[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Dst { uint dst[]; };

void main() {
    const uint word = gl_GlobalInvocationID.x, line = gl_GlobalInvocationID.y;
    const uint row = line / push.scale, across = 25u * push.scale * (line % push.scale);
    const uint each = push.bits == 8u ? 4u : 2u, width = pvr_param(C_WIDTH);
    if (row >= pvr_param(C_ROWS) || word >= push.out_stride) return;
    if (word * each >= push.scale * width * push.step) return;

    const float top = push.bits == 8u ? 255.0 : 65535.0;
    const int last_x = int(width) - 1, last_y = int(pvr_param(C_HEIGHT)) - 1;
    uint packed = 0u;
    for (uint i = 0u; i < each; i++) {
        const uint s = word * each + i, wide = s / push.step, c = s % push.step;
        const int x = int(wide / push.scale);
        const uint phase = across + 25u * (wide % push.scale);
        float sum = 0.0;
        for (int t = 0; t < 5; t++) {
            const int fy = clamp(int(pvr_param(C_BAND_Y) + row) + t - 2, 0, last_y);
            const uint from = (uint(fy) - pvr_param(C_SRC_Y)) * push.stride;
            for (int j = 0; j < 5; j++) {
                const uint at = uint(clamp(x + j - 2, 0, last_x)) * push.step + c;
                sum += filters[phase + 5 * t + j]
                    * float(sample_of(src[from + word_at(at, push.bits)], at, push.bits));
            }
        }
        packed |= quantise(sum, top) << (i * (32u / each));
    }
    dst[line * push.out_stride + word] = packed;
}
