// SPDX-License-Identifier: Apache-2.0
// Products of weights as they are packed with activations that were rounded to match, for devices
// that multiply several small numbers at once. Four activations of a token are rounded together:
//     PACKED_INT8: a word of int8, in steps of the block's (32 activations) largest / 127;
//     PACKED_HALF: two words of halves, as parts of the largest: (0, 2) and (1, 3), since that is
//     how the bytes of a word of weights come apart.
// Dots of four rows at once are in whole steps; packed_scales says what w * x then is.
#ifndef PVR_PACKED_GLSL
#define PVR_PACKED_GLSL

#if defined(PACKED_INT8)
#extension GL_EXT_spirv_intrinsics : require

#define PACKED_WORDS 1u  // of four activations

spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6019, 6018],
                  id = 4450)
int packed_sdot(int a, int b, spirv_literal int packed_4x8);

// Four products of int8, added.
int packed_dot(uint a, uint b) { return packed_sdot(int(a), int(b), 0); }

// What the largest of a block makes of it: the step, and the factor that turns x into steps.
vec2 packed_step(float most) {
    return most > 1e-30 ? vec2(most / 127.0, 127.0 / most) : vec2(0.0);
}

// Four activations, and in `sum` their sum in steps.
uint packed_round(vec4 x, float factor, out float sum) {
    ivec4 q = ivec4(roundEven(x * factor));
    sum = float(q.x + q.y + q.z + q.w);
    uvec4 u = uvec4(q) & 255u;
    return u.x | u.y << 8 | u.z << 16 | u.w << 24;
}

#else
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require

#define PACKED_WORDS 2u

vec2 packed_step(float most) { return most > 1e-30 ? vec2(most, 1.0 / most) : vec2(0.0); }

uvec2 packed_round(vec4 x, float factor, out float sum) {
    vec4 part = x * factor;
    sum = dot(part, vec4(1.0));
    return uvec2(packHalf2x16(part.xz), packHalf2x16(part.yw));
}

// 0..255 in the low bytes of two halves, less `zero`. 0x6400 is 1024, whose last bit is worth 1.
f16vec2 packed_halves(uint bytes, float zero) {
    return unpackFloat2x16(bytes | 0x64006400u) - f16vec2(float16_t(1024.0 + zero));
}

f16vec2 packed_half2(uint word) { return unpackFloat2x16(word); }

// Eight products: of q4 one word, centred at 8; of q8 the words of k and k + 4.
float packed_dot_q4(uint q, uvec4 x) {
    f16vec2 sum = packed_halves(q & 0x000f000fu, 8.0) * packed_half2(x.x);
    sum += packed_halves(q >> 8 & 0x000f000fu, 8.0) * packed_half2(x.y);
    sum += packed_halves(q >> 4 & 0x000f000fu, 8.0) * packed_half2(x.z);
    sum += packed_halves(q >> 12 & 0x000f000fu, 8.0) * packed_half2(x.w);
    return float(sum.x) + float(sum.y);
}

float packed_dot_q8(uint p, uint q, uvec4 x) {
    p ^= 0x80808080u;
    q ^= 0x80808080u;
    f16vec2 sum = packed_halves(p & 0x00ff00ffu, 128.0) * packed_half2(x.x);
    sum += packed_halves(p >> 8 & 0x00ff00ffu, 128.0) * packed_half2(x.y);
    sum += packed_halves(q & 0x00ff00ffu, 128.0) * packed_half2(x.z);
    sum += packed_halves(q >> 8 & 0x00ff00ffu, 128.0) * packed_half2(x.w);
    return float(sum.x) + float(sum.y);
}

#endif
#endif
