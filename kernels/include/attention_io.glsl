// SPDX-License-Identifier: Apache-2.0
// What every attention kernel reads and writes, as the contracts of both operations say.
#ifndef PVR_ATTENTION_IO_GLSL
#define PVR_ATTENTION_IO_GLSL

layout(push_constant) uniform Push {
    uint heads; uint kv_heads; uint dim; uint ctx; float scale; uint window; float softcap;
} push;
layout(std430, set = 0, binding = 1) readonly buffer Qkv { vec4 qkv[]; };
layout(std430, set = 0, binding = 2) readonly buffer Keys { uvec2 keys[]; };
layout(std430, set = 0, binding = 3) readonly buffer Values { uint values[]; };
layout(std430, set = 0, binding = 4) writeonly buffer Out { vec2 result[]; };

// The first of the positions before `end` that count.
uint attention_begin(uint end) {
    return push.window == 0u || end < push.window ? 0u : end - push.window;
}

// A scaled score under the soft cap. tanh from an exponential that may overflow, as the built-in
// one must not.
float attention_cap(float score) {
    if (push.softcap == 0.0)
        return score;
    return push.softcap * (1.0 - 2.0 / (exp(2.0 * score / push.softcap) + 1.0));
}

#endif
