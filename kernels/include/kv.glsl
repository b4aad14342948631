// SPDX-License-Identifier: Apache-2.0
// The KV caches of a layer, as kernels/kv.py lays them out: halves, or with KV_Q8 int8 with scales.
// They are at the bindings KV_BINDING and the next or, with KV_ADDRESS, where push.kc and push.vc
// say. KV_ACCESS is readonly or writeonly. A head of them is seen through
//     KV_KEYS(i), KV_VALUES(i)                  a word of the rows: KV_WORD, four elements of f16 or
//                                               of q8, or (KV_PAIRS) two of f16
//     KV_KEY_SCALES(i), KV_VALUE_SCALES(i)      q8: a word of the scales, two of them
// after kv_open(head) said which. push has kv_heads, dim and ctx.
#ifndef PVR_KV_GLSL
#define PVR_KV_GLSL

#if defined(KV_Q8) || defined(KV_PAIRS)
#define KV_WORD uint
#else
#define KV_WORD uvec2
#endif

uint kv_scale_words() { return (push.dim + 63u) >> 6; }  // of a row

#if defined(KV_ADDRESS)

layout(buffer_reference, std430, buffer_reference_align = 8) KV_ACCESS buffer KvWords {
    KV_WORD at[];
};
layout(buffer_reference, std430, buffer_reference_align = 4) KV_ACCESS buffer KvScales {
    uint at[];
};

// address + a * b, in 64 bits.
uvec2 kv_behind(uvec2 address, uint a, uint b) {
    uint high, low, carry;
    umulExtended(a, b, high, low);
    low = uaddCarry(address.x, low, carry);
    return uvec2(low, address.y + high + carry);
}

KvWords kv_keys, kv_values;
#define KV_KEYS(i) kv_keys.at[i]
#define KV_VALUES(i) kv_values.at[i]

#if defined(KV_Q8)
KvScales kv_key_scales, kv_value_scales;
#define KV_KEY_SCALES(i) kv_key_scales.at[i]
#define KV_VALUE_SCALES(i) kv_value_scales.at[i]

void kv_open(uint head) {
    uint row = head * push.ctx, rows = push.kv_heads * push.ctx, each = 4u * kv_scale_words();
    kv_keys = KvWords(kv_behind(push.kc, row, push.dim));
    kv_values = KvWords(kv_behind(push.vc, row, push.dim));
    kv_key_scales = KvScales(kv_behind(kv_behind(push.kc, rows, push.dim), row, each));
    kv_value_scales = KvScales(kv_behind(kv_behind(push.vc, rows, push.dim), row, each));
}
#else
void kv_open(uint head) {
    kv_keys = KvWords(kv_behind(push.kc, head * push.ctx, 2u * push.dim));
    kv_values = KvWords(kv_behind(push.vc, head * push.ctx, 2u * push.dim));
}
#endif

#else

layout(std430, set = 0, binding = KV_BINDING) KV_ACCESS buffer Keys { KV_WORD keys[]; };
layout(std430, set = 0, binding = KV_BINDING + 1) KV_ACCESS buffer Values { KV_WORD values[]; };

uint kv_first;
#define KV_KEYS(i) keys[kv_first + (i)]
#define KV_VALUES(i) values[kv_first + (i)]

#if defined(KV_Q8)
uint kv_first_scale;
#define KV_KEY_SCALES(i) keys[kv_first_scale + (i)]
#define KV_VALUE_SCALES(i) values[kv_first_scale + (i)]

void kv_open(uint head) {
    kv_first = head * push.ctx * (push.dim >> 2);
    kv_first_scale =
        push.kv_heads * push.ctx * (push.dim >> 2) + head * push.ctx * kv_scale_words();
}
#elif defined(KV_PAIRS)
void kv_open(uint head) { kv_first = head * push.ctx * (push.dim >> 1); }
#else
void kv_open(uint head) { kv_first = head * push.ctx * (push.dim >> 2); }
#endif

#endif

#endif
