/* SPDX-License-Identifier: Apache-2.0 */
/* A row of a 3x3 convolution of bytes. Four channels of a pixel are a word, so that one instruction
 * adds four products to a pixel's sum where the CPU has one (VNNI, dotprod); elsewhere the same sums
 * come slower. Rows lie [channels / 4][xs] words; weights of four inputs are a word, too. */
#ifndef PVR_CONV_INT8_H
#define PVR_CONV_INT8_H

#include "video.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

/* dotprod takes signed bytes alone: 0..255 are kept as -128..127. */
#if defined(__ARM_FEATURE_DOTPROD)
enum { INT8_SHIFT = 128 };
#else
enum { INT8_SHIFT = 0 };
#endif

/* acc + the sum of four products of bytes, in each lane. */
static inline __attribute__((always_inline)) vi pvr_dot4(vi acc, vi x, int32_t w) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)x, _mm512_set1_epi32(w));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)x, vreinterpretq_s8_s32(vdupq_n_s32(w)));
#else
    for (int i = 0; i < 4; i++) acc += (x >> (8 * i) & 255) * (int32_t)(int8_t)(w >> (8 * i));
    return acc;
#endif
}

#if defined(__AVX512F__) || defined(__aarch64__)
enum { INT8_MOST = 8 };
#else
enum { INT8_MOST = 4 };
#endif

typedef struct {
    const int32_t *x[3];      /* rows of input, [cin / 4][xs] */
    const int32_t *w;         /* [cout / 4][3][cin / 4][3][4] */
    const float *unit;        /* of a sum, for each output: [cout] */
    const float *bias;        /* [cout], what the inputs' zeros make of the sum taken off */
    const float *slope;       /* [cout] */
    const int32_t *skip;      /* bytes to add before the slope, [cout / 4][xs], or NULL */
    const float *skip_inverse, *skip_zero; /* of these bytes, as below */
    const float *inverse, *zero;           /* of the output: byte = value * inverse + zero */
    int32_t *y;               /* bytes out, [cout / 4][xs], or */
    float *values;            /* floats out, [cout][xs] */
    size_t cin, cout, xs;
} pvr_int8_row;

/* What is kept of four channels' values on the scale of bytes, 0.5 added: held to 0..255, cut off. */
static inline __attribute__((always_inline)) vi pvr_kept(const vf q[4]) {
#if defined(__AVX512BW__) || defined(__AVX2__)
    /* Saturating packs leave four bytes of each channel in a lane of 128 bits. */
    vi n[4];
    for (int i = 0; i < 4; i++) n[i] = pvr_truncated(q[i]);
    const __m128i turn = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#if defined(__AVX512BW__)
    const __m512i ab = _mm512_packs_epi32((__m512i)n[0], (__m512i)n[1]);
    const __m512i cd = _mm512_packs_epi32((__m512i)n[2], (__m512i)n[3]);
    return (vi)_mm512_shuffle_epi8(_mm512_packus_epi16(ab, cd), _mm512_broadcast_i32x4(turn));
#else
    const __m256i ab = _mm256_packs_epi32((__m256i)n[0], (__m256i)n[1]);
    const __m256i cd = _mm256_packs_epi32((__m256i)n[2], (__m256i)n[3]);
    const __m256i both = _mm256_broadcastsi128_si256(turn);
    return (vi)_mm256_shuffle_epi8(_mm256_packus_epi16(ab, cd), both);
#endif
#else
    vi word = {0};
    for (int i = 0; i < 4; i++) {
        const vf held = pvr_smaller(pvr_greater(q[i], (vf){0}), (vf){0} + 255.5f);
        word |= pvr_truncated(held) << (8 * i);
    }
    if (INT8_SHIFT) word ^= (int32_t)0x80808080;
    return word;
#endif
}

static inline __attribute__((always_inline)) void int8_finish(const pvr_int8_row *g, size_t o,
                                                              size_t x, const vi *sums,
                                                              size_t step) {
    vf q[4];
    for (size_t i = 0; i < 4; i++) {
        vf r = __builtin_convertvector(sums[i * step], vf) * g->unit[o + i] + g->bias[o + i];
        if (g->skip) {
            vi word = *(const vi *)(g->skip + o / 4 * g->xs + x);
            if (INT8_SHIFT) word ^= (int32_t)0x80808080;
            const vf add = __builtin_convertvector(word >> (8 * (int)i) & 255, vf);
            r += (add - g->skip_zero[o + i]) * (1.0f / g->skip_inverse[o + i]);
        }
        q[i] = pvr_prelu(r, g->slope[o + i]);
    }
    if (g->values)
        for (size_t i = 0; i < 4; i++) *(vf *)(g->values + (o + i) * g->xs + x) = q[i];
    else {
        for (size_t i = 0; i < 4; i++) q[i] = q[i] * g->inverse[o + i] + (g->zero[o + i] + 0.5f);
        *(vi *)(g->y + o / 4 * g->xs + x) = pvr_kept(q);
    }
}

/* OC output channels from o0 on of NV vectors from column x on. */
#define PVR_INT8_BLOCK(OC, NV)                                                            \
    static void int8_block_##OC##_##NV(const pvr_int8_row *g, size_t o0, size_t x) {      \
        const size_t sets = g->cin / 4;                                                   \
        const int32_t *k[OC / 4];                                                         \
        for (size_t i = 0; i < OC / 4; i++) k[i] = g->w + (o0 / 4 + i) * 36 * sets;       \
        vi acc[OC][NV];                                                                   \
        for (int o = 0; o < OC; o++)                                                      \
            for (int v = 0; v < NV; v++) acc[o][v] = (vi){0};                             \
        for (size_t a = 0; a < 3; a++)                                                    \
            for (size_t c = 0; c < sets; c++)                                             \
                for (size_t b = 0; b < 3; b++) {                                          \
                    const int32_t *s = g->x[a] + c * g->xs + x + b;                       \
                    vi t[NV];                                                             \
                    for (int v = 0; v < NV; v++) t[v] = *(const vi *)(s + v * VL);        \
                    for (int o = 0; o < OC; o++)                                          \
                        for (int v = 0; v < NV; v++)                                      \
                            acc[o][v] = pvr_dot4(acc[o][v], t[v], k[o / 4][o % 4]);       \
                    for (int i = 0; i < OC / 4; i++) k[i] += 4;                           \
                }                                                                         \
        for (int v = 0; v < NV; v++)                                                      \
            for (int o = 0; o < OC; o += 4)                                               \
                int8_finish(g, o0 + (size_t)o, x + (size_t)v * VL, &acc[o][v], NV);       \
    }

PVR_INT8_BLOCK(4, 1)
PVR_INT8_BLOCK(4, 2)
#if defined(__AVX512F__) || defined(__aarch64__)
PVR_INT8_BLOCK(8, 1)
PVR_INT8_BLOCK(8, 2)
#endif
#undef PVR_INT8_BLOCK

/* The columns 0..n-1, up to whole vectors; reads two columns and a vector beyond them. */
static inline void pvr_conv_int8(const pvr_int8_row *g, size_t n) {
    const size_t each = INT8_MOST == 8 && g->cout % 8 == 0 ? 8 : 4;
    for (size_t x = 0; x < n;) {
        const int two = x + VL < n;
        for (size_t o = 0; o < g->cout; o += each) {
#if defined(__AVX512F__) || defined(__aarch64__)
            if (each == 8) {
                if (two) int8_block_8_2(g, o, x);
                else int8_block_8_1(g, o, x);
                continue;
            }
#endif
            if (two) int8_block_4_2(g, o, x);
            else int8_block_4_1(g, o, x);
        }
        x += two ? 2 * VL : VL;
    }
}

#endif
