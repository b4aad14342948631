// SPDX-License-Identifier: Apache-2.0
// What attention_step's kernels read and write (kernels/attention_step/op.py). STEP_WORD is the
// type that the caches are read by, uvec2 or uvec4: four or eight halves.
#ifndef PVR_ATTENTION_STEP_IO_GLSL
#define PVR_ATTENTION_STEP_IO_GLSL

layout(push_constant) uniform Push {
    uint fmt; uint heads; uint kv_heads; uint dim; uint ctx; float scale; uint window; float softcap;
    uint rope_dims; uint neox;
} push;
layout(std430, set = 0, binding = 1) buffer Qkv { vec4 qkv[]; };
layout(std430, set = 0, binding = 2) readonly buffer Table { vec4 table[]; };
layout(std430, set = 0, binding = 3) buffer Keys { STEP_WORD keys[]; };
layout(std430, set = 0, binding = 4) buffer Values { STEP_WORD values[]; };

#include "attention_score.glsl"

// Elements 4i..4i+3 of a head of Q or K, whose first four are at `base`, rotated by the position.
vec4 step_turned(uint base, uint i) {
    vec4 x = qkv[base + i];
    uint quads = push.rope_dims >> 2, row = pvr_pos0() * quads;
    if (i >= quads)
        return x;
    if (push.neox == 0u) {
        vec4 cs = table[row + i];
        return vec4(x.x * cs.x - x.y * cs.y, x.x * cs.y + x.y * cs.x,
                    x.z * cs.z - x.w * cs.w, x.z * cs.w + x.w * cs.z);
    }
    bool second = i >= quads >> 1;
    uint j = second ? i - (quads >> 1) : i;
    vec4 other = qkv[base + (second ? j : j + (quads >> 1))];
    vec4 t = table[row + 2u * j], u = table[row + 2u * j + 1u];
    vec4 c = vec4(t.xz, u.xz), s = vec4(t.yw, u.yw);
    return second ? other * s + x * c : x * c - other * s;
}

uvec2 step_halves(vec4 x) { return uvec2(packHalf2x16(x.xy), packHalf2x16(x.zw)); }
vec4 step_floats(uvec2 word) { return vec4(unpackHalf2x16(word.x), unpackHalf2x16(word.y)); }

// As the cache keeps it.
vec4 step_kept(vec4 x) { return step_floats(step_halves(x)); }

#endif
