// SPDX-License-Identifier: Apache-2.0
// Sums and maxima over a workgroup of PVR_WG_X invocations (a power of two, at least 64), for all of
// them. With WIDE_SUBGROUP a subgroup of any size reduces before shared memory does, without it
// shared memory alone does. To be called by every invocation.
#ifndef PVR_WIDE_GLSL
#define PVR_WIDE_GLSL

#if defined(WIDE_SUBGROUP)
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require

shared float wide_parts[PVR_WG_X];

#define WIDE_REDUCE(name, subgroup, join)                  \
    float name(float x) {                                  \
        x = subgroup(x);                                   \
        barrier();                                         \
        if (subgroupElect())                               \
            wide_parts[gl_SubgroupID] = x;                 \
        barrier();                                         \
        x = wide_parts[0];                                 \
        for (uint i = 1u; i < gl_NumSubgroups; i++)        \
            x = join(x, wide_parts[i]);                    \
        return x;                                          \
    }

#else

shared float wide_parts[PVR_WG_X + 16];

#define WIDE_REDUCE(name, subgroup, join)                                \
    float name(float x) {                                                \
        uint lane = gl_LocalInvocationID.x;                              \
        wide_parts[lane] = x;                                            \
        barrier();                                                       \
        if (lane < 16u) {                                                \
            for (uint i = lane + 16u; i < uint(PVR_WG_X); i += 16u)      \
                x = join(x, wide_parts[i]);                              \
            wide_parts[uint(PVR_WG_X) + lane] = x;                       \
        }                                                                \
        barrier();                                                       \
        x = wide_parts[PVR_WG_X];                                        \
        for (uint i = 1u; i < 16u; i++)                                  \
            x = join(x, wide_parts[uint(PVR_WG_X) + i]);                 \
        return x;                                                        \
    }

#endif

float wide_plus(float a, float b) { return a + b; }

WIDE_REDUCE(wide_sum, subgroupAdd, wide_plus)
WIDE_REDUCE(wide_max, subgroupMax, max)

#endif
