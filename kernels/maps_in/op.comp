// SPDX-License-Identifier: Apache-2.0
#version 450
#include "pvr.glsl"
#include "maps.glsl"
#include "video.glsl"

layout(push_constant) uniform Push {
    uint bits, stride, step_, phase, half_, centred, plane_w, plane_h, add, lanes;
    uint w, h, xs, ps, origin;
    float c0, c1, c2, o0, o1, o2;
} push;
layout(std430, set = 0, binding = 1) readonly buffer Src { uint src[]; };
layout(std430, set = 0, binding = 2) buffer Y { vec4 y[]; };

float sample_at(uint row, uint column) {
    const uint i = column * push.step_ + push.phase;
    return float(sample_of(src[row * push.stride + word_at(i, push.bits)], i, push.bits));
}

// Which samples of an axis make the frame's sample `at`, and the second one's share.
uvec2 placed(uint at, uint size, bool centred, out float share) {
    share = 0.0;
    if (push.half_ == 0u) return uvec2(min(at, size - 1u));
    const float where = float(at) * 0.5 - (centred ? 0.25 : 0.0), low = floor(where);
    share = where - low;
    return uvec2(clamp(ivec2(int(low)) + ivec2(0, 1), 0, int(size) - 1));
}

void main() {
    const uint x = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    if (x >= push.w || row >= push.h) return;
    const uint y0 = pvr_param(Y0), first = push.half_ == 0u ? y0 : max(y0 / 2u, 1u) - 1u;
    float across, down;
    const uvec2 v = placed(y0 + row, push.plane_h, true, down) - first;
    const uvec2 u = placed(pvr_param(X0) + x, push.plane_w, push.centred != 0u, across);
    float value = sample_at(v.x, u.x);
    if (push.half_ != 0u) {
        const float above = mix(value, sample_at(v.x, u.y), across);
        value = mix(above, mix(sample_at(v.y, u.x), sample_at(v.y, u.y), across), down);
    }
    const vec4 one = vec4(push.c0, push.c1, push.c2, 0.0) * value
                   + vec4(push.o0, push.o1, push.o2, 0.0);
    const uint to = (push.origin + row * push.xs + x) * (push.lanes / 4u);
    y[to] = push.add != 0u ? y[to] + one : one;
    if (push.add == 0u)
        for (uint quad = 1u; quad < push.lanes / 4u; quad++) y[to + quad] = vec4(0.0);
}
