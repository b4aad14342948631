// SPDX-License-Identifier: Apache-2.0
// An invocation takes two pairs of neighbours of a head: those that it rotates together, so that it
// owns whole words of the caches. Grid: (heads + 2 kv_heads) dim / 4 over x, tokens over y and z.
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push {
    uint heads; uint kv_heads; uint dim; uint ctx; uint rope_dims; uint neox;
} push;
layout(std430, set = 0, binding = 1) buffer Qkv { vec2 qkv[]; };
layout(std430, set = 0, binding = 2) readonly buffer Table { vec2 table[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Keys { uint keys[]; };
layout(std430, set = 0, binding = 4) writeonly buffer Values { uint values[]; };

vec2 turn(float a, float b, vec2 cs) { return vec2(a * cs.x - b * cs.y, a * cs.y + b * cs.x); }

void main() {
    uint token = pvr_token_group();
    uint width = push.heads + 2u * push.kv_heads;
    uint quads = push.dim >> 2;
    uint head = gl_GlobalInvocationID.x / quads;
    uint quad = gl_GlobalInvocationID.x % quads;
    if (token >= pvr_n_tokens() || head >= width)
        return;
    uint pos = pvr_pos0() + token;
    bool rotated = quad < push.rope_dims >> 2 && head < push.heads + push.kv_heads;
    bool halves = rotated && push.neox != 0u;
    uint first = halves ? quad : 2u * quad;  // in pairs of elements
    uint second = halves ? quad + (push.rope_dims >> 2) : first + 1u;
    uint base = (token * width + head) * (push.dim >> 1);
    vec2 u = qkv[base + first], v = qkv[base + second];
    if (rotated) {
        uint entry = pos * (push.rope_dims >> 1) + 2u * quad;
        vec2 cs0 = table[entry], cs1 = table[entry + 1u];
        if (halves) {
            vec2 p = turn(u.x, v.x, cs0), q = turn(u.y, v.y, cs1);
            u = vec2(p.x, q.x);
            v = vec2(p.y, q.y);
        } else {
            u = turn(u.x, u.y, cs0);
            v = turn(v.x, v.y, cs1);
        }
        qkv[base + first] = u;
        qkv[base + second] = v;
    }
    if (head < push.heads)
        return;
    uint kv = head - push.heads;
    bool key = kv < push.kv_heads;
    uint cached = ((key ? kv : kv - push.kv_heads) * push.ctx + pos) * (push.dim >> 1);
    if (key) {
        keys[cached + first] = packHalf2x16(u);
        keys[cached + second] = packHalf2x16(v);
    } else {
        values[cached + first] = packHalf2x16(u);
        values[cached + second] = packHalf2x16(v);
    }
}
