// SPDX-License-Identifier: Apache-2.0
// An invocation takes four rows and four tokens: a weight is unpacked once for all of these tokens,
// and what is loaded of x serves four rows. Sums are separate variables, since an array that a
// driver does not unroll would lie in memory. Grid: n / 4 over x, tokens / 4 over y and z.
// With TILED see matmul_tiled.glsl, with COOPMAT matmul_coopmat.glsl.
#version 450
#if defined(TILED) || defined(COOPMAT)
#extension GL_EXT_control_flow_attributes : require
#endif
#if defined(PACKED_INT8) || defined(PACKED_HALF)
#define PACKED
#endif
#if defined(TILED) && defined(PACKED)
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif
#include "pvr.glsl"
#if defined(COOPMAT)
#include "coopmat.glsl"
#endif
#if defined(PACKED)
#include "packed.glsl"
#endif
#define WEIGHTS_BINDING 1
#define WEIGHTS_QUADS
#include "weights.glsl"

layout(push_constant) uniform Push {
    uint fmt; uint n; uint k; uint accumulate; uint y0; uint ldy;
} push;
layout(std430, set = 0, binding = 2) readonly buffer X { vec4 x[]; };
layout(std430, set = 0, binding = 3) buffer Y { float y[]; };

void store1(uint row, uint yi, float sum) {
    if (row < push.n)
        y[yi] = push.accumulate != 0u ? y[yi] + sum : sum;
}

void store(uint row, uint token, vec4 sum) {
    if (token >= pvr_n_tokens())
        return;
    uint yi = token * push.ldy + push.y0 + row;
    store1(row, yi, sum.x);
    store1(row + 1u, yi + 1u, sum.y);
    store1(row + 2u, yi + 2u, sum.z);
    store1(row + 3u, yi + 3u, sum.w);
}

#if defined(TILED)
#include "matmul_words.glsl"
#include "matmul_tiled.glsl"
#elif defined(COOPMAT)
#include "matmul_coopmat.glsl"
#else

// Column r times scale[r], plus minimum[r].
mat4 scaled(mat4 q, vec4 scale, vec4 minimum) {
    return mat4(q[0] * scale.x + minimum.x, q[1] * scale.y + minimum.y, q[2] * scale.z + minimum.z,
                q[3] * scale.w + minimum.w);
}

void main() {
    uint quad = gl_GlobalInvocationID.x;
    uint token = pvr_token_group() * 4u;
    if (quad * 4u >= push.n || token >= pvr_n_tokens())
        return;
    uint last = pvr_n_tokens() - 1u;  // tokens past it are read as it and not stored
    uint width = push.k >> 2;
#define FOR_TOKENS(DO) DO(0) DO(1) DO(2) DO(3)
#define BEGIN(t) uint x##t = min(token + uint(t), last) * width; vec4 sum##t = vec4(0.0);
    FOR_TOKENS(BEGIN)
    uint at = weights_quad(quad, push.k);
    for (uint block = 0u; block < push.k >> 5; block++) {
        vec4 scale, minimum;
        weights_scales(at, scale, minimum);
        for (uint j = 0u; j < 4u; j++) {
            mat4 a, b;
            weights_eights(at, j, a, b);
            a = scaled(a, scale, minimum);
            b = scaled(b, scale, minimum);
            uint i = block * 8u + j * 2u;
#define STEP(t) sum##t += x[x##t + i] * a + x[x##t + i + 1u] * b;
            FOR_TOKENS(STEP)
        }
        at += WEIGHTS_BLOCK;
    }
#define END(t) store(quad * 4u, token + uint(t), sum##t);
    FOR_TOKENS(END)
}

#endif
