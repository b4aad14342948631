// SPDX-License-Identifier: Apache-2.0
// An invocation makes a word of the plane, the samples of which may be left alone at the core's ends:
// the core begins at whole words.
#version 450
#include "pvr.glsl"
#include "maps.glsl"
#include "video.glsl"

layout(push_constant) uniform Push {
    uint bits, stride, step_, half_, centred, frame_w, frame_h, s, lanes, w, h, xs, ps, origin;
    float c0, c1, c2, d0, d1, d2, o;
} push;
layout(std430, set = 0, binding = 1) readonly buffer X { vec4 x[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Dst { uint dst[]; };

int held(int i, uint n) { return clamp(i, 0, int(n) - 1); }

vec3 at(int row, int column) {
    const int i = held(held(row, push.frame_h) - int(push.s * pvr_param(Y0)), push.h);
    const int j = held(held(column, push.frame_w) - int(push.s * pvr_param(X0)), push.w);
    const vec3 v = x[(push.origin + uint(i) * push.xs + uint(j)) * (push.lanes / 4u)].xyz;
    return mix(vec3(0.0), min(v, vec3(1.0)), greaterThan(v, vec3(0.0)));
}

// The channels at a pixel of the plane.
vec3 mean(int i, int j) {
    if (push.half_ == 0u) return at(i, j);
    if (push.centred != 0u)
        return 0.25 * (at(2 * i, 2 * j) + at(2 * i, 2 * j + 1) + at(2 * i + 1, 2 * j)
                       + at(2 * i + 1, 2 * j + 1));
    return 0.125 * (at(2 * i, 2 * j - 1) + at(2 * i, 2 * j + 1) + at(2 * i + 1, 2 * j - 1)
                    + at(2 * i + 1, 2 * j + 1)) + 0.25 * (at(2 * i, 2 * j) + at(2 * i + 1, 2 * j));
}

void main() {
    const uint by = push.half_ != 0u ? 2u : 1u, row = gl_GlobalInvocationID.y;
    const uint x0 = push.s * pvr_param(CORE_X0) / by, y0 = push.s * pvr_param(CORE_Y0) / by;
    const uint x1 = (push.s * pvr_param(CORE_X1) + by - 1u) / by;
    const uint y1 = (push.s * pvr_param(CORE_Y1) + by - 1u) / by;
    const uint each = 32u / push.bits;
    const uint word = x0 * push.step_ / each + gl_GlobalInvocationID.x;
    if (y0 + row >= y1 || word * each >= x1 * push.step_) return;
    uint packed = 0u;
    for (uint i = 0u; i < each; i++) {
        const uint n = word * each + i, j = n / push.step_;
        const vec3 k = n % push.step_ == 0u ? vec3(push.c0, push.c1, push.c2)
                                            : vec3(push.d0, push.d1, push.d2);
        const float v = dot(k, mean(int(y0 + row), int(j))) + push.o;
        packed |= quantise(v, push.bits == 8u ? 255.0 : 65535.0) << (i * push.bits);
    }
    dst[row * push.stride + word] = packed;
}
