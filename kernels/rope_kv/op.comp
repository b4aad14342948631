// SPDX-License-Identifier: Apache-2.0
// An invocation takes two pairs of neighbours of a head: those that it rotates together, so that it
// owns whole words of a cache of halves. Grid: (heads + 2 kv_heads) dim / 4 over x, tokens over y
// and z. With KV_Q8 a workgroup of 32 takes a whole head. Grid: heads + 2 kv_heads over x.
#version 450
#include "pvr.glsl"

#if defined(KV_ADDRESS)
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#endif

layout(push_constant) uniform Push {
    uint fmt; uint heads; uint kv_heads; uint dim; uint ctx; uint rope_dims; uint neox;
#if defined(KV_ADDRESS)
    uvec2 kc; uvec2 vc;
#endif
} push;
layout(std430, set = 0, binding = 1) buffer Qkv { vec2 qkv[]; };
layout(std430, set = 0, binding = 2) readonly buffer Table { vec2 table[]; };

#define KV_PAIRS
#define KV_BINDING 3
#define KV_ACCESS writeonly
#include "kv.glsl"

vec2 turn(float a, float b, vec2 cs) { return vec2(a * cs.x - b * cs.y, a * cs.y + b * cs.x); }

// Two pairs of a head, rotated in place: where they are in it, counted in pairs, and what they are.
void rotate(uint token, uint head, uint quad, out uint first, out uint second, out vec2 u,
            out vec2 v) {
    bool rotated = quad < push.rope_dims >> 2 && head < push.heads + push.kv_heads;
    bool halves = rotated && push.neox != 0u;
    first = halves ? quad : 2u * quad;
    second = halves ? quad + (push.rope_dims >> 2) : first + 1u;
    uint base = (token * (push.heads + 2u * push.kv_heads) + head) * (push.dim >> 1);
    u = qkv[base + first];
    v = qkv[base + second];
    if (!rotated)
        return;
    uint entry = (pvr_pos0() + token) * (push.rope_dims >> 1) + 2u * quad;
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

#if defined(KV_Q8)

shared vec2 row[128];
shared float greatest[64];  // of four neighbours

// The scale of 32 elements; it is a half already.
float scale_of(uint block) {
    float most = 0.0;
    for (uint i = 0u; i < 8u; i++)
        most = max(most, greatest[8u * block + i]);
    most = max(most * (1.0 / 127.0), 1.0 / 16384.0);
    return uintBitsToFloat((floatBitsToUint(most) + 0x1fffu) & 0xffffe000u);
}

uint packed(uint quad, float inverse) {
    vec2 low = row[2u * quad] * inverse, high = row[2u * quad + 1u] * inverse;
    ivec4 q = ivec4(roundEven(vec4(low, high))) & 255;
    return uint(q.x | q.y << 8 | q.z << 16 | q.w << 24);
}

void main() {
    uint token = pvr_token_group(), head = gl_WorkGroupID.x, lane = gl_LocalInvocationID.x;
    uint quads = push.dim >> 2;
    if (token >= pvr_n_tokens())
        return;
    for (uint quad = lane; quad < quads; quad += 32u) {
        uint first, second;
        vec2 u, v;
        rotate(token, head, quad, first, second, u, v);
        row[first] = u;
        row[second] = v;
    }
    if (head < push.heads)
        return;
    barrier();
    for (uint quad = lane; quad < 64u; quad += 32u) {
        vec2 most = quad < quads ? max(abs(row[2u * quad]), abs(row[2u * quad + 1u])) : vec2(0.0);
        greatest[quad] = max(most.x, most.y);
    }
    barrier();
    bool key = head < push.heads + push.kv_heads;
    kv_open((head - push.heads) % push.kv_heads);
    uint pos = pvr_pos0() + token;
    uint at = pos * quads, words = kv_scale_words();
    for (uint quad = lane; quad < quads; quad += 32u) {
        uint word = packed(quad, 1.0 / scale_of(quad >> 3));
        if (key)
            KV_KEYS(at + quad) = word;
        else
            KV_VALUES(at + quad) = word;
    }
    if (lane < words) {
        uint both = packHalf2x16(vec2(scale_of(2u * lane), scale_of(2u * lane + 1u)));
        if (key)
            KV_KEY_SCALES(pos * words + lane) = both;
        else
            KV_VALUE_SCALES(pos * words + lane) = both;
    }
}

#else

void main() {
    uint token = pvr_token_group();
    uint quads = push.dim >> 2;
    uint head = gl_GlobalInvocationID.x / quads;
    if (token >= pvr_n_tokens() || head >= push.heads + 2u * push.kv_heads)
        return;
    uint first, second;
    vec2 u, v;
    rotate(token, head, gl_GlobalInvocationID.x % quads, first, second, u, v);
    if (head < push.heads)
        return;
    uint row = (pvr_pos0() + token) * (push.dim >> 1);
    kv_open((head - push.heads) % push.kv_heads);
    if (head < push.heads + push.kv_heads) {
        KV_KEYS(row + first) = packHalf2x16(u);
        KV_KEYS(row + second) = packHalf2x16(v);
    } else {
        KV_VALUES(row + first) = packHalf2x16(u);
        KV_VALUES(row + second) = packHalf2x16(v);
    }
}

#endif
