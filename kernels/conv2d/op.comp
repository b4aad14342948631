// SPDX-License-Identifier: Apache-2.0
// An invocation does 4 pixels of a row and 8 output channels; their weights for a tap and an input
// channel are one load.
#version 450
#include "pvr.glsl"
#include "maps.glsl"

layout(push_constant) uniform Push {
    uint fmt, cin, cout, k, act, residual, xl, yl, w, h, xs, ps, origin;
} push;
layout(std430, set = 0, binding = 1) readonly buffer X { vec4 x[]; };
#ifdef FMT_F16
layout(std430, set = 0, binding = 2) readonly buffer W { uvec4 weights[]; };
#else
layout(std430, set = 0, binding = 2) readonly buffer W { uvec2 weights[]; };
#endif
layout(std430, set = 0, binding = 3) readonly buffer R { vec4 r[]; };
layout(std430, set = 0, binding = 4) writeonly buffer Y { vec4 y[]; };

// Eight numbers of the load number `at`.
void weights8(uint at, out vec4 a, out vec4 b) {
#ifdef FMT_F16
    const uvec4 v = weights[at];
    a = vec4(unpackHalf2x16(v.x), unpackHalf2x16(v.y));
    b = vec4(unpackHalf2x16(v.z), unpackHalf2x16(v.w));
#else
    const uvec2 v = weights[at];
    a = vec4(ivec4(v.x << 24, v.x << 16, v.x << 8, v.x) >> 24);
    b = vec4(ivec4(v.y << 24, v.y << 16, v.y << 8, v.y) >> 24);
#endif
}

// Four floats from the front of the weights.
vec4 front(uint at) {
#ifdef FMT_F16
    return uintBitsToFloat(weights[at]);
#else
    return uintBitsToFloat(uvec4(weights[2u * at], weights[2u * at + 1u]));
#endif
}

void main() {
    const uint x0 = 4u * gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint eighth = gl_GlobalInvocationID.z;
    if (x0 >= push.w || row >= push.h) return;

    vec4 a0 = vec4(0.0), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
    const uint quads = push.xl / 4u, taps = push.k * push.k, n8 = (push.cout + 7u) / 8u;
    const uint corner = push.origin - push.k / 2u * (push.xs + 1u) + row * push.xs + x0;
    // Loads of a block that come for each tap and channel, and of those before this half of it.
    const uint block0 = eighth & ~1u, each = min(n8 - block0, 2u);
#ifdef FMT_F16
    uint at = 4u * n8 + block0 * taps * push.cin + eighth % 2u;
#else
    const uint scales = 4u * n8;  // in uvec4
    uint at = 8u * n8 + 2u * n8 * push.cin / 4u + block0 * taps * push.cin + eighth % 2u;
#endif
    for (uint a = 0u; eighth < n8 && a < push.k; a++) {
        for (uint b = 0u; b < push.k; b++) {
            for (uint c = 0u; c < push.cin; c += 4u) {
                const uint block = c / push.xl, quad = c % push.xl / 4u;
                const uint i = (block * push.ps + corner + a * push.xs + b) * quads + quad;
                const vec4 p0 = x[i], p1 = x[i + quads], p2 = x[i + 2u * quads];
                const vec4 p3 = x[i + 3u * quads];
                vec4 u, v;
#ifdef FMT_F16
#define SCALED
#else
                const uint s = 2u * (scales + block0 * push.cin / 4u + c / 4u * each + eighth % 2u);
                const uvec4 h = uvec4(weights[s], weights[s + 1u]);
                const vec4 su = vec4(unpackHalf2x16(h.x), unpackHalf2x16(h.y));
                const vec4 sv = vec4(unpackHalf2x16(h.z), unpackHalf2x16(h.w));
#define SCALED u *= su; v *= sv;
#endif
#define STEP(n)                                                 \
                weights8(at + each * n, u, v);                  \
                SCALED                                          \
                a0 += u * p0[n]; b0 += v * p0[n];               \
                a1 += u * p1[n]; b1 += v * p1[n];               \
                a2 += u * p2[n]; b2 += v * p2[n];               \
                a3 += u * p3[n]; b3 += v * p3[n];
                STEP(0) STEP(1) STEP(2) STEP(3)
                at += 4u * each;
            }
        }
    }
    const uint lanes = (push.cout + push.yl - 1u) / push.yl * push.yl;
    for (uint half_ = 0u; half_ < 2u; half_++) {
        const uint quad = 2u * eighth + half_;
        if (4u * quad >= lanes) return;
        vec4 bias = vec4(0.0), slope = vec4(0.0);
        if (eighth < n8) {
            bias = front(quad);
            slope = front(2u * n8 + quad);
        }
        const uint lanes4 = push.yl / 4u;
        uint to = (quad / lanes4 * push.ps + push.origin + row * push.xs + x0) * lanes4;
        to += quad % lanes4;
        const uint n = min(4u, push.w - x0);
        for (uint p = 0u; p < n; p++) {
            vec4 v = half_ == 0u ? (p == 0u ? a0 : p == 1u ? a1 : p == 2u ? a2 : a3)
                                 : (p == 0u ? b0 : p == 1u ? b1 : p == 2u ? b2 : b3);
            const vec4 res = push.residual != 0u ? r[to] : vec4(0.0);
            v = activated(push.act, v + bias, slope, res);
            y[to] = push.act == ACT_GATE ? v : v + res;
            to += lanes4;
        }
    }
}
