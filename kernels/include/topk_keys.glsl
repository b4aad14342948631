// SPDX-License-Identifier: Apache-2.0
// Logits as numbers that are put in order without floats. Needs LEAST, the bits of -inf.
#ifndef PVR_TOPK_KEYS_GLSL
#define PVR_TOPK_KEYS_GLSL

// Unsigned keys in the order of the floats: 0 nothing, 1 NaN, then -inf to +inf with one zero.
uint key_of(uint bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 1u;
    if (bits == 0x80000000u)
        bits = 0u;
    return (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;
}

float value_of(uint key) { return uintBitsToFloat((key >> 31) != 0u ? key & 0x7fffffffu : ~key); }

// exp(x - top) that is 1 at x = top even where both are infinite.
float weight_of(float x, float top) { return x == top ? 1.0 : exp(x - top); }

// The greatest of what a key stands for; -inf of nothing and of NaN.
float top_of(uint key) { return key > 1u ? value_of(key) : uintBitsToFloat(LEAST); }

#endif
