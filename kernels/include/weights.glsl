// SPDX-License-Identifier: Apache-2.0
// Packed weight matrices (docs/architecture.md, "Weights"), for the format that FMT_Q4, FMT_Q8 or
// FMT_F16 names. Define WEIGHTS_BINDING first. Single rows:
//     uint at = weights_row(row, k);
//     vec2 scale = weights_scale(at);                 // w = scale.x * q + scale.y
//     weights_eight(at, row, j, a, b);                // j in 0..3: q of k = 8j..8j+3, 8j+4..8j+7
//     at += WEIGHTS_BLOCK;                            // the next 32 along k
// With WEIGHTS_QUADS, four neighbouring rows at once; column r of a and b is row r:
//     uint at = weights_quad(quad, k);                // rows 4 quad..4 quad + 3
//     weights_scales(at, scale, minimum);
//     weights_eights(at, j, a, b);                    // x * a: four rows times four elements of x
//     at += WEIGHTS_BLOCK;
// With WEIGHTS_UVEC4 too the words of f16 are four to an index, as those of q4 and q8 are, and there
// are no functions for them.
#ifndef PVR_WEIGHTS_GLSL
#define PVR_WEIGHTS_GLSL

#if defined(FMT_Q4)
#define WEIGHTS_WORDS 80u
#define WEIGHTS_MINIMUM 1
#elif defined(FMT_Q8)
#define WEIGHTS_WORDS 144u
#define WEIGHTS_MINIMUM 0
#elif defined(FMT_F16)
#define WEIGHTS_WORDS 256u
#define WEIGHTS_MINIMUM 0
#endif

// 0..15 in the low and in the high halves of four bytes.
vec4 weights_low(uint q) { return vec4(q & 15u, (q >> 8) & 15u, (q >> 16) & 15u, (q >> 24) & 15u); }
vec4 weights_high(uint q) { return weights_low(q >> 4); }

// Four signed bytes. By shifts: unpackSnorm4x8 clamps -128 and costs more.
vec4 weights_signed(uint word) {
    int q = int(word);
    return vec4((q << 24) >> 24, (q << 16) >> 24, (q << 8) >> 24, q >> 24);
}

#if defined(WEIGHTS_QUADS)

// A word of q4 and q8 is a row's, so four rows are a uvec4; four halves are a uvec2.
#if defined(FMT_F16) && defined(WEIGHTS_UVEC4)

layout(std430, set = 0, binding = WEIGHTS_BINDING) readonly buffer Weights { uvec4 weights[]; };
const uint WEIGHTS_BLOCK = WEIGHTS_WORDS / 4u;

#elif defined(FMT_F16)

layout(std430, set = 0, binding = WEIGHTS_BINDING) readonly buffer Weights { uvec2 weights[]; };
const uint WEIGHTS_BLOCK = WEIGHTS_WORDS / 2u;

void weights_scales(uint at, out vec4 scale, out vec4 minimum) {
    scale = vec4(1.0);
    minimum = vec4(0.0);
}

// One element of each of the four rows.
vec4 weights_column(uint at) {
    uvec2 words = weights[at];
    return vec4(unpackHalf2x16(words.x), unpackHalf2x16(words.y));
}

void weights_eights(uint at, uint j, out mat4 a, out mat4 b) {
    uint i = at + 32u * j;
    a = transpose(mat4(weights_column(i), weights_column(i + 4u), weights_column(i + 8u),
                       weights_column(i + 12u)));
    b = transpose(mat4(weights_column(i + 16u), weights_column(i + 20u), weights_column(i + 24u),
                       weights_column(i + 28u)));
}

#else

layout(std430, set = 0, binding = WEIGHTS_BINDING) readonly buffer Weights { uvec4 weights[]; };
const uint WEIGHTS_BLOCK = WEIGHTS_WORDS / 4u;

void weights_scales_of(uvec4 head, out vec4 scale, out vec4 minimum) {
    vec2 x = unpackHalf2x16(head.x), y = unpackHalf2x16(head.y);
    vec2 z = unpackHalf2x16(head.z), w = unpackHalf2x16(head.w);
    scale = vec4(x.x, y.x, z.x, w.x);
    minimum = vec4(x.y, y.y, z.y, w.y);
}

void weights_scales(uint at, out vec4 scale, out vec4 minimum) {
    weights_scales_of(weights[at], scale, minimum);
}

void weights_eights(uint at, uint j, out mat4 a, out mat4 b) {
#if defined(FMT_Q4)
    uvec4 q = weights[at + 4u + 4u * j];
    a = mat4(weights_low(q.x), weights_low(q.y), weights_low(q.z), weights_low(q.w));
    b = mat4(weights_high(q.x), weights_high(q.y), weights_high(q.z), weights_high(q.w));
#else
    uvec4 p = weights[at + 4u + 8u * j], q = weights[at + 8u + 8u * j];
    a = mat4(weights_signed(p.x), weights_signed(p.y), weights_signed(p.z), weights_signed(p.w));
    b = mat4(weights_signed(q.x), weights_signed(q.y), weights_signed(q.z), weights_signed(q.w));
#endif
}

#endif

// Where four rows of a matrix with k columns begin.
uint weights_quad(uint quad, uint k) {
    return (quad >> 2) * (k >> 5) * WEIGHTS_BLOCK + (quad & 3u);
}

#else

layout(std430, set = 0, binding = WEIGHTS_BINDING) readonly buffer Weights { uint weights[]; };
const uint WEIGHTS_BLOCK = WEIGHTS_WORDS;

#if defined(FMT_F16)

vec2 weights_scale(uint at) { return vec2(1.0, 0.0); }

float weights_half(uint at, uint row) {
    vec2 pair = unpackHalf2x16(weights[at]);
    return (row & 1u) == 0u ? pair.x : pair.y;
}

void weights_eight(uint at, uint row, uint j, out vec4 a, out vec4 b) {
    uint i = at + 64u * j;
    a = vec4(weights_half(i, row), weights_half(i + 8u, row), weights_half(i + 16u, row),
             weights_half(i + 24u, row));
    b = vec4(weights_half(i + 32u, row), weights_half(i + 40u, row), weights_half(i + 48u, row),
             weights_half(i + 56u, row));
}

#else

vec2 weights_scale(uint at) { return unpackHalf2x16(weights[at]); }

void weights_eight(uint at, uint row, uint j, out vec4 a, out vec4 b) {
#if defined(FMT_Q4)
    uint q = weights[at + 16u + 16u * j];
    a = weights_low(q);
    b = weights_high(q);
#else
    a = weights_signed(weights[at + 16u + 32u * j]);
    b = weights_signed(weights[at + 32u + 32u * j]);
#endif
}

#endif

// Where a row of a matrix with k columns begins.
uint weights_row(uint row, uint k) {
    uint lane = row & 15u;
#if defined(FMT_F16)
    lane >>= 1;
#endif
    return (row >> 4) * (k >> 5) * WEIGHTS_BLOCK + lane;
}

#endif
#endif
