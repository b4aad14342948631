// SPDX-License-Identifier: Apache-2.0
// What both ways share: where weights lie, and what follows a sum.
#version 450
#include "pvr.glsl"
#ifdef COOPMAT
#include "coopmat.glsl"
#extension GL_EXT_control_flow_attributes : require
#endif
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

// The weights of output channels 8 * eighth.. for a tap and an input channel: one load.
void weights_of(uint eighth, uint tap, uint c, out vec4 low, out vec4 high) {
    const uint n8 = (push.cout + 7u) / 8u, block0 = eighth & ~1u;
    const uint each = min(n8 - block0, 2u);  // loads of the block for a tap and a channel
    const uint at = block0 * push.k * push.k * push.cin + (tap * push.cin + c) * each + eighth % 2u;
#ifdef FMT_F16
    const uvec4 v = weights[4u * n8 + at];
    low = vec4(unpackHalf2x16(v.x), unpackHalf2x16(v.y));
    high = vec4(unpackHalf2x16(v.z), unpackHalf2x16(v.w));
#else
    const uvec2 v = weights[8u * n8 + n8 * push.cin / 2u + at];
    const uint s = 2u * (4u * n8 + block0 * push.cin / 4u + c / 4u * each + eighth % 2u);
    const uvec4 scale = uvec4(weights[s], weights[s + 1u]);
    low = vec4(ivec4(v.x << 24, v.x << 16, v.x << 8, v.x) >> 24)
        * vec4(unpackHalf2x16(scale.x), unpackHalf2x16(scale.y));
    high = vec4(ivec4(v.y << 24, v.y << 16, v.y << 8, v.y) >> 24)
        * vec4(unpackHalf2x16(scale.z), unpackHalf2x16(scale.w));
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

// Stores four channels of a pixel after bias, activation and residual.
void finish(vec4 sum, uint quad, uint row, uint column) {
    if (4u * quad >= (push.cout + push.yl - 1u) / push.yl * push.yl) return;
    const uint n8 = (push.cout + 7u) / 8u, lanes4 = push.yl / 4u;
    const bool weighted = quad < 2u * n8;
    const vec4 bias = weighted ? front(quad) : vec4(0.0);
    const vec4 slope = weighted ? front(2u * n8 + quad) : vec4(0.0);
    const uint pixel = quad / lanes4 * push.ps + push.origin + row * push.xs + column;
    const uint to = pixel * lanes4 + quad % lanes4;
    const vec4 other = push.residual != 0u ? r[to] : vec4(0.0);
    const vec4 v = activated(push.act, sum + bias, slope, other);
    y[to] = push.act == ACT_GATE ? v : v + other;
}

#ifdef COOPMAT
#include "conv2d_coopmat.glsl"
#else
#include "conv2d_plain.glsl"
#endif
