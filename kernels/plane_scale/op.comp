// SPDX-License-Identifier: Apache-2.0
// An invocation makes a word of the enlarged plane.
#version 450
#include "pvr.glsl"
#include "maps.glsl"
#include "video.glsl"

layout(push_constant) uniform Push {
    uint bits, stride, out_stride, step_, half_, s, plane_w, plane_h, rows;
} push;
layout(std430, set = 0, binding = 1) readonly buffer Src { uint src[]; };
layout(std430, set = 0, binding = 2) readonly buffer F { float filters[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Dst { uint dst[]; };

const int TAPS = 4, REACH = 2;

void main() {
    const uint word = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y, s = push.s;
    const uint by = push.half_ != 0u ? 2u : 1u;
    const uint y0 = pvr_param(CORE_Y0) / by, y1 = (pvr_param(CORE_Y1) + by - 1u) / by;
    if (word >= push.out_stride || row >= (y1 - y0) * s) return;
    const uint starts = 2u * TAPS * s, each = 32u / push.bits;
    const int first = max(int(y0) - REACH, 0);
    const int top = int(y0 + row / s) + int(filters[starts + row % s]);
    uint packed = 0u;
    for (uint n = 0u; n < each; n++) {
        const uint i = word * each + n, j = i / push.step_;
        const int left = int(j / s) + int(filters[starts + s + j % s]);
        float sum = 0.0;
        for (int b = 0; b < TAPS; b++) {
            const uint column = uint(clamp(left + b, 0, int(push.plane_w) - 1));
            const uint at = column * push.step_ + i % push.step_;
            float part = 0.0;
            for (int a = 0; a < TAPS; a++) {
                const uint line = uint(clamp(top + a, 0, int(push.plane_h) - 1) - first);
                const uint w = src[line * push.stride + word_at(at, push.bits)];
                part += filters[row % s * TAPS + a] * float(sample_of(w, at, push.bits));
            }
            sum += filters[(s + j % s) * TAPS + b] * part;
        }
        packed |= quantise(sum, push.bits == 8u ? 255.0 : 65535.0) << (n * push.bits);
    }
    dst[row * push.out_stride + word] = packed;
}
