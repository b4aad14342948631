// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a tile of 16 rows: an invocation four rows (so that what it loads of x serves
// four times) and every eighth block along k; the eight parts are added in shared memory.
// Grid: n / 16 over x and y.
// With WIDE an invocation takes eight elements of four rows in every so-manieth block, so that
// neighbours read what lies side by side and a large GPU has enough of them.
#version 450
#if defined(WIDE_SUBGROUP)
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif
#include "pvr.glsl"
#define WEIGHTS_BINDING 1
#define WEIGHTS_QUADS
#include "weights.glsl"

layout(push_constant) uniform Push { uint fmt; uint n; uint k; uint accumulate; uint y0; } push;
layout(std430, set = 0, binding = 2) readonly buffer X { vec4 x[]; };
layout(std430, set = 0, binding = 3) buffer Y { float y[]; };

#if defined(WIDE)

const uint BLOCKS = PVR_WG_X / 16u;  // of a step: four invocations along k for each of four quads
shared vec4 parts[PVR_WG_X];

void main() {
    uint tile = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
#if defined(WIDE_SUBGROUP)
    uint lane = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
#else
    uint lane = gl_LocalInvocationID.x;
#endif
    uint j = (lane >> 2) & 3u, first = lane >> 4;
    if (tile * 16u >= push.n)
        return;
    uint at = weights_quad(tile * 4u + (lane & 3u), push.k) + first * WEIGHTS_BLOCK;
    vec4 sum = vec4(0.0);
    for (uint block = first; block < push.k >> 5; block += BLOCKS) {
        mat4 a, b;
        vec4 scale, minimum;
        vec4 xa = x[block * 8u + 2u * j], xb = x[block * 8u + 2u * j + 1u];
        weights_eights(at, j, a, b);
        weights_scales(at, scale, minimum);
        sum += scale * (xa * a + xb * b);
#if WEIGHTS_MINIMUM
        sum += minimum * dot(xa + xb, vec4(1.0));
#endif
        at += BLOCKS * WEIGHTS_BLOCK;
    }
    uint count = PVR_WG_X;  // parts that are left, the quads of rows in turn
#if defined(WIDE_SUBGROUP)
    uint size = gl_SubgroupSize;
    for (uint step = 4u; step < size; step <<= 1)
        sum += subgroupShuffleXor(sum, step);
    uint each = min(size, 4u), part = gl_SubgroupInvocationID;
    if (part < each)
        parts[gl_SubgroupID * each + part] = sum;
    count = gl_NumSubgroups * each;
    barrier();
#else
    parts[lane] = sum;
    barrier();
    for (count >>= 1; count >= 32u; count >>= 1) {
        if (lane < count)
            parts[lane] += parts[lane + count];
        barrier();
    }
    count <<= 1;
#endif
    uint row = tile * 16u + lane;
    if (lane >= 16u || row >= push.n)
        return;
    float total = 0.0;
    for (uint i = lane >> 2; i < count; i += 4u)
        total += parts[i][lane & 3u];
    uint yi = push.y0 + row;
    y[yi] = push.accumulate != 0u ? y[yi] + total : total;
}

#else

const uint SLICES = 8u;
shared vec4 parts[32];

void main() {
    uint tile = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint lane = gl_LocalInvocationID.x;
    uint slice = lane >> 2;
    if (tile * 16u >= push.n)
        return;
    uint at = weights_quad(tile * 4u + (lane & 3u), push.k) + slice * WEIGHTS_BLOCK;
    vec4 sum = vec4(0.0);
    for (uint block = slice; block < push.k >> 5; block += SLICES) {
        vec4 products = vec4(0.0), ones = vec4(0.0), scale, minimum;
        for (uint j = 0u; j < 4u; j++) {
            mat4 a, b;
            weights_eights(at, j, a, b);
            vec4 xa = x[block * 8u + 2u * j], xb = x[block * 8u + 2u * j + 1u];
            products += xa * a + xb * b;
#if WEIGHTS_MINIMUM
            ones += xa + xb;
#endif
        }
        weights_scales(at, scale, minimum);
        sum += scale * products;
#if WEIGHTS_MINIMUM
        sum += minimum * dot(ones, vec4(1.0));
#endif
        at += SLICES * WEIGHTS_BLOCK;
    }
    parts[lane] = sum;
    barrier();
    uint row = tile * 16u + lane;
    if (lane >= 16u || row >= push.n)
        return;
    float total = 0.0;
    for (uint i = 0u; i < SLICES; i++)
        total += parts[(lane >> 2) + 4u * i][lane & 3u];
    uint yi = push.y0 + row;
    y[yi] = push.accumulate != 0u ? y[yi] + total : total;
}

#endif
