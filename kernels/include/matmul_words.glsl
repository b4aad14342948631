// SPDX-License-Identifier: Apache-2.0
// Weights on their way to shared memory: of four neighbouring rows four elements, 4 four..4 four + 3
// of a block, as they are stored. For matmul's variants with tiles; needs weights.glsl with quads.
#ifndef PVR_MATMUL_WORDS_GLSL
#define PVR_MATMUL_WORDS_GLSL

#if defined(FMT_F16)
struct Words { uvec2 k[4]; };
#else
struct Words { uvec4 head, q; };
#endif

// `at` is where the block of these rows begins (weights_quad).
Words fetch_rows(uint at, uint four) {
    Words words;
#if defined(FMT_F16)
    [[unroll]] for (uint i = 0u; i < 4u; i++)
        words.k[i] = weights[at + (four * 4u + i) * 4u];
#else
    words.head = weights[at];
#if defined(FMT_Q4)
    words.q = weights[at + 4u + 4u * (four >> 1)];
#else
    words.q = weights[at + 4u + 4u * four];
#endif
#endif
    return words;
}

#endif
