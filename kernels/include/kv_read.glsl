// SPDX-License-Identifier: Apache-2.0
// Elements of a head's keys and values as floats.
#ifndef PVR_KV_READ_GLSL
#define PVR_KV_READ_GLSL

#define KV_ACCESS readonly
#include "kv.glsl"

#if defined(KV_Q8)

vec4 kv_bytes(uint word) {
    int w = int(word);
    return vec4(bitfieldExtract(w, 0, 8), bitfieldExtract(w, 8, 8), bitfieldExtract(w, 16, 8),
                w >> 24);
}

// The scale of four elements, from the word that it is in.
float kv_scale(uint word, uint quad) {
    vec2 both = unpackHalf2x16(word);
    return (quad & 8u) == 0u ? both.x : both.y;
}

// Four neighbours of the row of position p.
vec4 kv_key(uint p, uint quad) {
    float scale = kv_scale(KV_KEY_SCALES(p * kv_scale_words() + (quad >> 4)), quad);
    return scale * kv_bytes(KV_KEYS(p * (push.dim >> 2) + quad));
}

vec4 kv_value(uint p, uint quad) {
    float scale = kv_scale(KV_VALUE_SCALES(p * kv_scale_words() + (quad >> 4)), quad);
    return scale * kv_bytes(KV_VALUES(p * (push.dim >> 2) + quad));
}

// Two neighbours.
vec2 kv_value_pair(uint p, uint pair) {
    int w = int(KV_VALUES(p * (push.dim >> 2) + (pair >> 1)));
    int shift = int(pair & 1u) << 4;
    float scale = kv_scale(KV_VALUE_SCALES(p * kv_scale_words() + (pair >> 5)), pair >> 1);
    return scale * vec2(bitfieldExtract(w, shift, 8), bitfieldExtract(w, shift + 8, 8));
}

#elif defined(KV_PAIRS)

vec4 kv_key(uint p, uint quad) {
    uint at = p * (push.dim >> 1) + 2u * quad;
    return vec4(unpackHalf2x16(KV_KEYS(at)), unpackHalf2x16(KV_KEYS(at + 1u)));
}

vec2 kv_value_pair(uint p, uint pair) {
    return unpackHalf2x16(KV_VALUES(p * (push.dim >> 1) + pair));
}

#else

vec4 kv_halves(uvec2 word) { return vec4(unpackHalf2x16(word.x), unpackHalf2x16(word.y)); }
vec4 kv_key(uint p, uint quad) { return kv_halves(KV_KEYS(p * (push.dim >> 2) + quad)); }
vec4 kv_value(uint p, uint quad) { return kv_halves(KV_VALUES(p * (push.dim >> 2) + quad)); }

#endif

#endif
