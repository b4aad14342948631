// SPDX-License-Identifier: Apache-2.0
// What every attention kernel reads and writes, as the contracts of both operations say.
// ATTENTION_OUT is the type that the output is written in, vec2 or vec4.
#ifndef PVR_ATTENTION_IO_GLSL
#define PVR_ATTENTION_IO_GLSL

#if defined(KV_ADDRESS)
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#define ATTENTION_OUT_BINDING 2
#else
#define ATTENTION_OUT_BINDING 4
#endif

layout(push_constant) uniform Push {
    uint fmt; uint heads; uint kv_heads; uint dim; uint ctx; float scale; uint window; float softcap;
#if defined(KV_ADDRESS)
    uvec2 kc; uvec2 vc;
#endif
} push;
layout(std430, set = 0, binding = 1) readonly buffer Qkv { vec4 qkv[]; };
layout(std430, set = 0, binding = ATTENTION_OUT_BINDING) writeonly buffer Out {
    ATTENTION_OUT result[];
};

#define KV_BINDING 2
#include "kv_read.glsl"

#include "attention_score.glsl"

#endif
