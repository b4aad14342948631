// SPDX-License-Identifier: Apache-2.0
// An invocation does one word of an output row.
#version 450
#include "pvr.glsl"
#include "video.glsl"

layout(push_constant) uniform Push {
    uint bits, step, plane, stride, out_stride, width, taps_down, taps_across, rows;
} push;
layout(std430, set = 0, binding = 1) readonly buffer Src { uint src[]; };
layout(std430, set = 0, binding = 2) readonly buffer Down { uint down[]; };
layout(std430, set = 0, binding = 3) readonly buffer Across { uint across[]; };
layout(std430, set = 0, binding = 4) writeonly buffer Dst { uint dst[]; };

void main() {
    const uint word = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint each = push.bits == 8u ? 4u : 2u;
    if (row >= pvr_param(push.plane + 4u) || word >= push.out_stride) return;
    if (word * each >= push.width * push.step) return;

    const float top = push.bits == 8u ? 255.0 : 65535.0;
    const uint rec = (pvr_param(push.plane + 2u) + row) * (push.taps_down + 1u);
    const uint first = down[rec] - pvr_param(push.plane + 3u);
    uint packed = 0u;
    for (uint i = 0u; i < each; i++) {
        const uint s = word * each + i, c = s % push.step;
        const uint x = min(s / push.step, push.width - 1u), col = x * (push.taps_across + 1u);
        float sum = 0.0;
        for (uint a = 0u; a < push.taps_down; a++) {
            float line = 0.0;
            for (uint b = 0u; b < push.taps_across; b++) {
                const uint at = (across[col] + b) * push.step + c;
                const uint w = src[(first + a) * push.stride + word_at(at, push.bits)];
                line += uintBitsToFloat(across[col + 1u + b]) * float(sample_of(w, at, push.bits));
            }
            sum += uintBitsToFloat(down[rec + 1u + a]) * line;
        }
        packed |= quantise(sum, top) << (i * (32u / each));
    }
    dst[row * push.out_stride + word] = packed;
}
