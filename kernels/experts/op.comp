// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a tile of 16 rows of one expert for one token, or of all its experts one after
// the other (sum), as matvec does it: an invocation four rows and every eighth block along k.
// Grid: n / 16 over x, rows of y (tokens, or tokens times experts) over y and z.
#version 450
#include "pvr.glsl"
#define WEIGHTS_BINDING 1
#define WEIGHTS_QUADS
#include "weights.glsl"

layout(push_constant) uniform Push {
    uint fmt; uint n; uint k; uint first; uint count; uint used; uint sum; uint y0; uint ldy;
} push;
layout(std430, set = 0, binding = 2) readonly buffer X { vec4 x[]; };
layout(std430, set = 0, binding = 3) readonly buffer Route { uvec2 route[]; };
layout(std430, set = 0, binding = 4) buffer Y { float y[]; };

const uint SLICES = 8u;
shared vec4 parts[32];

// Four rows of a matrix (those of `quad`) times this invocation's slice of row `xi` of x.
vec4 product(uint quad, uint slice, uint xi) {
    uint at = weights_quad(quad, push.k) + slice * WEIGHTS_BLOCK;
    uint from = xi * (push.k >> 2);
    vec4 sum = vec4(0.0);
    for (uint block = slice; block < push.k >> 5; block += SLICES) {
        vec4 products = vec4(0.0), ones = vec4(0.0), scale, minimum;
        for (uint j = 0u; j < 4u; j++) {
            mat4 a, b;
            weights_eights(at, j, a, b);
            vec4 xa = x[from + block * 8u + 2u * j], xb = x[from + block * 8u + 2u * j + 1u];
            products += xa * a + xb * b;
            ones += xa + xb;
        }
        weights_scales(at, scale, minimum);
        sum += scale * products;
#if WEIGHTS_MINIMUM
        sum += minimum * dot(ones, vec4(1.0));
#endif
        at += SLICES * WEIGHTS_BLOCK;
    }
    return sum;
}

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint row = pvr_token_group();
    bool add = push.sum != 0u;
    uint last = pvr_n_tokens() * (add ? 1u : push.used);
    uint tile = gl_WorkGroupID.x;
    if (row >= last || tile * 16u >= push.n)
        return;
    uint first = add ? row * push.used : row, count = add ? push.used : 1u;
    vec4 sum = vec4(0.0);
    bool any = false;
    for (uint j = 0u; j < count; j++) {
        uvec2 chosen = route[first + j];
        uint expert = chosen.x - push.first;  // wraps below the first, and is then beyond the count
        if (expert >= push.count)
            continue;
        any = true;
        uint quad = (expert * (push.n >> 4) + tile) * 4u + (lane & 3u);
        vec4 rows = product(quad, lane >> 2, add ? first + j : row / push.used);
        sum += add ? uintBitsToFloat(chosen.y) * rows : rows;
    }
    parts[lane] = sum;
    barrier();
    if (lane >= 16u || !any)
        return;
    float total = 0.0;
    for (uint i = 0u; i < SLICES; i++)
        total += parts[(lane >> 2) + 4u * i][lane & 3u];
    uint yi = row * push.ldy + push.y0 + tile * 16u + lane;
    y[yi] = add ? y[yi] + total : total;
}
