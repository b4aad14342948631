// SPDX-License-Identifier: Apache-2.0
// Stage 0: a workgroup finds the 64 best of 1024 logits: the 64th key by bisection over its bits,
// then whatever lies above (and of the equals the first), then a sort of those 64 by counting.
// Stage 1: one workgroup merges the sorted lists. Grid: v / 1024 over x, or 1.
// By workgroups of 32 (topk_narrow.glsl) or, with WIDE, of 256 (topk_broad.glsl).
#version 450
#if defined(WIDE_SUBGROUP)
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#endif
#include "pvr.glsl"

layout(push_constant) uniform Push { uint v; uint stage; } push;
layout(std430, set = 0, binding = 1) readonly buffer Logits { uint logits[]; };
layout(std430, set = 0, binding = 2) buffer Part { uint part[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Out { uint result[]; };

const uint TOP = 64u, BLOCK = 1024u, RECORD = 130u, NONE = 0xffffffffu, LEAST = 0xff800000u;

#include "topk_keys.glsl"

#if defined(WIDE)
#include "topk_broad.glsl"
#else
#include "topk_narrow.glsl"
#endif

void main() {
    if (push.stage == 0u)
        blockwise(gl_LocalInvocationID.x, gl_WorkGroupID.x);
    else
        merge(gl_LocalInvocationID.x, (push.v + BLOCK - 1u) / BLOCK);
}
