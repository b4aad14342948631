// SPDX-License-Identifier: Apache-2.0
// Packed weight matrices (docs/architecture.md, "Weights"), for the format that FMT_Q4, FMT_Q8 or FMT_F16 names.
// An invocation takes a row: the 16 rows of a tile lie side by side, so the loads of neighbours are contiguous.
//
// Use: define WEIGHTS_BINDING, include, then for each block of 32 along k
//     uint at = weights_row(row, k);
//     vec2 scale = weights_scale(at);                 // w = scale.x * q + scale.y
//     weights_eight(at, row, j, a, b);                // j in 0..3: q of elements 8j..8j+3 and 8j+4..8j+7
//     at += WEIGHTS_BLOCK;
#ifndef PVR_WEIGHTS_GLSL
#define PVR_WEIGHTS_GLSL

layout(std430, set = 0, binding = WEIGHTS_BINDING) readonly buffer Weights { uint weights[]; };

#if defined(FMT_Q4)

const uint WEIGHTS_BLOCK = 80u;
#define WEIGHTS_MINIMUM 1

vec2 weights_scale(uint at) { return unpackHalf2x16(weights[at]); }

void weights_eight(uint at, uint row, uint j, out vec4 a, out vec4 b) {
    uint q = weights[at + 16u + 16u * j];
    a = vec4(q & 15u, (q >> 8) & 15u, (q >> 16) & 15u, (q >> 24) & 15u);
    b = vec4((q >> 4) & 15u, (q >> 12) & 15u, (q >> 20) & 15u, q >> 28);
}

#elif defined(FMT_Q8)

const uint WEIGHTS_BLOCK = 144u;
#define WEIGHTS_MINIMUM 0

vec2 weights_scale(uint at) { return unpackHalf2x16(weights[at]); }

// Shifts, not unpackSnorm4x8: that clamps -128.
vec4 weights_signed(uint word) {
    int q = int(word);
    return vec4((q << 24) >> 24, (q << 16) >> 24, (q << 8) >> 24, q >> 24);
}

void weights_eight(uint at, uint row, uint j, out vec4 a, out vec4 b) {
    a = weights_signed(weights[at + 16u + 32u * j]);
    b = weights_signed(weights[at + 32u + 32u * j]);
}

#elif defined(FMT_F16)

const uint WEIGHTS_BLOCK = 256u;
#define WEIGHTS_MINIMUM 0

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
