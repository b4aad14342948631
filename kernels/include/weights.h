/* SPDX-License-Identifier: Apache-2.0 */
/* Packed weights times activations on the CPU (docs/architecture.md, "Weights").
 *
 * For q8 and q4 the activations are rounded to int8 with a scale for each 32 along k; a block of a
 * tile is then a dot product of bytes, 16 rows at once: y += scale_w * scale_x * dot + min_w *
 * sum_x, where sum_x is the sum of the rounded activations (with the exact sum the rounding errors
 * would meet the quants, which are all positive, and not the smaller weights that they stand for).
 */
#ifndef PVR_WEIGHTS_H
#define PVR_WEIGHTS_H

#include "lanes.h"

enum {
    WEIGHTS_BLOCK = 32, /* elements along k that share a scale */
    WEIGHTS_Q4 = 80,    /* words of a tile and block */
    WEIGHTS_Q8 = 144,
    WEIGHTS_F16 = 256,
    WEIGHTS_K = 2 * LANES, /* bytes of a tile's k in halves */
    WEIGHTS_AHEAD = 4096,  /* bytes of halves from memory that are fetched before they are needed */
#if defined(PVR_AVX512)
    WEIGHTS_TOKENS = 8, /* tokens of matmul's inner block: what the registers hold sums for */
#else
    WEIGHTS_TOKENS = 4,
#endif
#if defined(__AVX2__)
    WEIGHTS_RUNS = 6, /* tiles of quants from places far apart that are multiplied side by side */
#else
    WEIGHTS_RUNS = 1,
#endif
};

PVR_INLINE size_t weights_block_words(uint32_t fmt) {
    return fmt == PVR_Q4 ? WEIGHTS_Q4 : fmt == PVR_Q8 ? WEIGHTS_Q8 : WEIGHTS_F16;
}

/* One block of `tokens` rounded activations is int8 [tokens][32], then float scale, float sum and
 * int32 start (-128 times the sum of the int8, see vb_signed) for each token. */
PVR_INLINE size_t weights_quants_nbytes(size_t k, size_t tokens) {
    return k / WEIGHTS_BLOCK * tokens * 44;
}

/* Rounds 32 activations of a token into place `token` of a block. x = NULL: zeros. */
static inline void weights_quantise(const float *x, uint8_t *block, size_t token, size_t tokens) {
    int8_t *q = (int8_t *)block + token * WEIGHTS_BLOCK;
    float *scale = (float *)(block + tokens * WEIGHTS_BLOCK) + token, *sum = scale + tokens;
    int32_t *start = (int32_t *)(sum + tokens);
    if (!x) {
        memset(q, 0, WEIGHTS_BLOCK);
        *scale = *sum = 0;
        *start = 0;
        return;
    }
    int32_t most = 0; /* as bits, whose order is that of the magnitudes */
    for (int i = 0; i < WEIGHTS_BLOCK; i++) {
        int32_t bits = (int32_t)(pvr_bits(x[i]) & 0x7fffffffu);
        most = bits > most ? bits : most;
    }
    float range = pvr_float((uint32_t)most);
    float factor = range > 1e-30f ? 127.0f / range : 0.0f;
    int32_t total = 0;
    for (int i = 0; i < WEIGHTS_BLOCK; i++) {
        int32_t v = (int32_t)pvr_bits(x[i] * factor + 12582912.0f) -
                    0x4b400000; /* to the nearest, ties to even */
        q[i] = (int8_t)v;
        total += v;
    }
    *scale = range > 1e-30f ? range / 127.0f : 0.0f;
    *sum = *scale * (float)total;
    *start = -128 * total;
}

#if defined(PVR_RVV)
#include "weights_rvv.h"
#else

/* Bytes of 16 rows x 4 k (vb), and the running dot products of a block (vd). _u: weights 0..15, _s:
 * int8. */
#if defined(PVR_AVX512)

typedef __m512i vb;
typedef __m512i vd;

PVR_INLINE vb vb_load(const uint32_t *p) { return _mm512_loadu_si512(p); }
PVR_INLINE vb vb_low(vb w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
PVR_INLINE vb vb_high(vb w) {
    return _mm512_and_si512(_mm512_srli_epi32(w, 4), _mm512_set1_epi8(15));
}
/* dpbusd wants one side unsigned: w + 128, corrected by 128 times the sum of the activations at the
 * start. */
PVR_INLINE vb vb_signed(vb w) { return _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80)); }
PVR_INLINE __m512i vb_four_(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm512_set1_epi32(four);
}
PVR_INLINE vd vd_start_u(void) { return _mm512_setzero_si512(); }
PVR_INLINE vd vd_dot_u(vd d, vb w, const int8_t *x) {
    return _mm512_dpbusd_epi32(d, w, vb_four_(x));
}
PVR_INLINE vi vd_end_u(vd d) { return d; }
PVR_INLINE vd vd_start_s(int32_t start) { return _mm512_set1_epi32(start); }
PVR_INLINE vd vd_dot_s(vd d, vb w, const int8_t *x) {
    return _mm512_dpbusd_epi32(d, w, vb_four_(x));
}
PVR_INLINE vi vd_end_s(vd d) { return d; }

#elif defined(__AVX2__)

typedef vi vb;
typedef vi vd;

PVR_INLINE vb vb_load(const uint32_t *p) {
    return (vb){_mm256_loadu_si256((const __m256i *)p),
                _mm256_loadu_si256((const __m256i *)(p + 8))};
}
PVR_INLINE vb vb_low(vb w) {
    __m256i mask = _mm256_set1_epi8(15);
    return (vb){_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask)};
}
PVR_INLINE vb vb_high(vb w) {
    return vb_low((vb){_mm256_srli_epi32(w.a, 4), _mm256_srli_epi32(w.b, 4)});
}
PVR_INLINE vb vb_signed(vb w) { return w; }
PVR_INLINE __m256i vb_four_(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}
/* A block's sums fit 16 bits: 8 steps of at most 2 * 15 * 127. */
PVR_INLINE vd vd_start_u(void) { return (vd){_mm256_setzero_si256(), _mm256_setzero_si256()}; }
PVR_INLINE vd vd_dot_u(vd d, vb w, const int8_t *x) {
    __m256i four = vb_four_(x);
    return (vd){_mm256_add_epi16(d.a, _mm256_maddubs_epi16(w.a, four)),
                _mm256_add_epi16(d.b, _mm256_maddubs_epi16(w.b, four))};
}
PVR_INLINE vi vd_end_u(vd d) {
    __m256i ones = _mm256_set1_epi16(1);
    return (vi){_mm256_madd_epi16(d.a, ones), _mm256_madd_epi16(d.b, ones)};
}
/* |w| times x with the sign of w: at most 2 * 128 * 127 a step, so 16 bits do not overflow. */
PVR_INLINE __m256i vd_signed_(__m256i w, __m256i x) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
PVR_INLINE vd vd_start_s(int32_t start) {
    (void)start;
    return vd_start_u();
}
PVR_INLINE vd vd_dot_s(vd d, vb w, const int8_t *x) {
    __m256i four = vb_four_(x);
    return (vd){_mm256_add_epi32(d.a, vd_signed_(w.a, four)),
                _mm256_add_epi32(d.b, vd_signed_(w.b, four))};
}
PVR_INLINE vi vd_end_s(vd d) { return d; }

#elif defined(__aarch64__)

typedef struct { int8x16_t v[4]; } vb;
#if defined(__ARM_FEATURE_DOTPROD)
typedef struct { int32x4_t v[4]; } vd;
#else
typedef struct { int32x4_t v[8]; } vd; /* two lanes a row, added at the end */
#endif

PVR_INLINE vb vb_load(const uint32_t *p) {
    vb r;
    LANES_EACH_ r.v[i_] = vreinterpretq_s8_u32(vld1q_u32(p + 4 * i_));
    return r;
}
PVR_INLINE vb vb_low(vb w) {
    LANES_EACH_ w.v[i_] = vandq_s8(w.v[i_], vdupq_n_s8(15));
    return w;
}
PVR_INLINE vb vb_high(vb w) {
    LANES_EACH_ w.v[i_] = vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(w.v[i_]), 4));
    return w;
}
PVR_INLINE vb vb_signed(vb w) { return w; }
PVR_INLINE vd vd_start_u(void) {
    vd d;
    memset(&d, 0, sizeof d);
    return d;
}
PVR_INLINE vd vd_dot_u(vd d, vb w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
#if defined(__ARM_FEATURE_DOTPROD)
    int8x16_t xs = vreinterpretq_s8_s32(vdupq_n_s32(four));
    LANES_EACH_ d.v[i_] = vdotq_s32(d.v[i_], w.v[i_], xs);
#else
    int8x8_t xs = vreinterpret_s8_s32(vdup_n_s32(four));
    LANES_EACH_ {
        d.v[2 * i_] = vpadalq_s16(d.v[2 * i_], vmull_s8(vget_low_s8(w.v[i_]), xs));
        d.v[2 * i_ + 1] = vpadalq_s16(d.v[2 * i_ + 1], vmull_s8(vget_high_s8(w.v[i_]), xs));
    }
#endif
    return d;
}
PVR_INLINE vi vd_end_u(vd d) {
    vi r;
#if defined(__ARM_FEATURE_DOTPROD)
    LANES_EACH_ r.v[i_] = (i_group)d.v[i_];
#else
    LANES_EACH_ r.v[i_] = (i_group)vpaddq_s32(d.v[2 * i_], d.v[2 * i_ + 1]);
#endif
    return r;
}
PVR_INLINE vd vd_start_s(int32_t start) {
    (void)start;
    return vd_start_u();
}
PVR_INLINE vd vd_dot_s(vd d, vb w, const int8_t *x) { return vd_dot_u(d, w, x); }
PVR_INLINE vi vd_end_s(vd d) { return vd_end_u(d); }

#else

/* Plain vectors: each byte of a word times the activation that it belongs to, in int32. */
typedef struct { u_group v[4]; } vb;
typedef vi vd;

PVR_INLINE vb vb_load(const uint32_t *p) {
    vb r;
    memcpy(&r, p, sizeof r);
    return r;
}
PVR_INLINE vb vb_low(vb w) {
    LANES_EACH_ w.v[i_] &= 0x0f0f0f0fu;
    return w;
}
PVR_INLINE vb vb_high(vb w) {
    LANES_EACH_ w.v[i_] = (w.v[i_] >> 4) & 0x0f0f0f0fu;
    return w;
}
PVR_INLINE vb vb_signed(vb w) { return w; }
PVR_INLINE vd vd_start_u(void) {
    vd d;
    memset(&d, 0, sizeof d);
    return d;
}
#if defined(__SSE2__)
/* pmaddwd: bytes 0 and 2 of a word as two 16-bit numbers, then bytes 1 and 3. */
PVR_INLINE vd vd_dot_s(vd d, vb w, const int8_t *x) {
    __m128i even = _mm_set1_epi32((int32_t)((uint16_t)x[0] | (uint32_t)(uint16_t)x[2] << 16));
    __m128i odd = _mm_set1_epi32((int32_t)((uint16_t)x[1] | (uint32_t)(uint16_t)x[3] << 16));
    LANES_EACH_ {
        __m128i a = _mm_srai_epi16(_mm_slli_epi16((__m128i)w.v[i_], 8), 8);
        __m128i b = _mm_srai_epi16((__m128i)w.v[i_], 8);
        d.v[i_] += (i_group)_mm_madd_epi16(a, even) + (i_group)_mm_madd_epi16(b, odd);
    }
    return d;
}
#else
PVR_INLINE vd vd_dot_s(vd d, vb w, const int8_t *x) {
    LANES_EACH_ {
        i_group q = (i_group)w.v[i_];
        d.v[i_] += (q << 24 >> 24) * x[0] + (q << 16 >> 24) * x[1] + (q << 8 >> 24) * x[2] +
                   (q >> 24) * x[3];
    }
    return d;
}
#endif
PVR_INLINE vd vd_dot_u(vd d, vb w, const int8_t *x) { return vd_dot_s(d, w, x); }
PVR_INLINE vi vd_end_u(vd d) { return d; }
PVR_INLINE vd vd_start_s(int32_t start) {
    (void)start;
    return vd_start_u();
}
PVR_INLINE vi vd_end_s(vd d) { return d; }

#endif

/* sums[t] = one tile (16 rows) times `tokens` columns of rounded activations (weights_quantise), in
 * q4 or q8. With `tokens` a constant all loops unroll and the sums stay in registers. */
PVR_INLINE void weights_tile_q4(const uint32_t *tile, size_t blocks, const uint8_t *quants,
                                size_t tokens, vf *sums) {
    for (size_t t = 0; t < tokens; t++)
        sums[t] = vf_set1(0);
    for (size_t b = 0; b < blocks; b++, tile += WEIGHTS_Q4, quants += tokens * 44) {
        const int8_t *q = (const int8_t *)quants;
        const float *scale = (const float *)(quants + tokens * WEIGHTS_BLOCK),
                    *sum = scale + tokens;
        vf factor, minimum;
        vf_half2(tile, &factor, &minimum);
        vb w[8];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            vb both = vb_load(tile + 16 + 16 * j);
            w[2 * j] = vb_low(both);
            w[2 * j + 1] = vb_high(both);
        }
#pragma GCC unroll 8
        for (size_t t = 0; t < tokens; t++) {
            vd d = vd_start_u();
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                d = vd_dot_u(d, w[j], q + t * WEIGHTS_BLOCK + 4 * j);
            sums[t] = vf_fma(vf_of_int(vd_end_u(d)), vf_mul(factor, vf_set1(scale[t])), sums[t]);
            sums[t] = vf_fma(minimum, vf_set1(sum[t]), sums[t]);
        }
    }
}

PVR_INLINE void weights_tile_q8(const uint32_t *tile, size_t blocks, const uint8_t *quants,
                                size_t tokens, vf *sums) {
    for (size_t t = 0; t < tokens; t++)
        sums[t] = vf_set1(0);
    for (size_t b = 0; b < blocks; b++, tile += WEIGHTS_Q8, quants += tokens * 44) {
        const int8_t *q = (const int8_t *)quants;
        const float *scale = (const float *)(quants + tokens * WEIGHTS_BLOCK);
        const int32_t *start = (const int32_t *)(scale + 2 * tokens);
        vf factor, none;
        vf_half2(tile, &factor, &none);
        vb w[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            w[j] = vb_signed(vb_load(tile + 16 + 16 * j));
#pragma GCC unroll 8
        for (size_t t = 0; t < tokens; t++) {
            vd d = vd_start_s(start[t]);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                d = vd_dot_s(d, w[j], q + t * WEIGHTS_BLOCK + 4 * j);
            sums[t] = vf_fma(vf_of_int(vd_end_s(d)), vf_mul(factor, vf_set1(scale[t])), sums[t]);
        }
    }
}

/* sum + one block of q4 times a column of rounded activations. */
PVR_INLINE vf weights_block_q4(const uint32_t *tile, const uint8_t *quants, vf sum) {
    const int8_t *q = (const int8_t *)quants;
    const float *scale = (const float *)(quants + WEIGHTS_BLOCK);
    vf factor, minimum;
    vf_half2(tile, &factor, &minimum);
    vd d = vd_start_u();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const vb both = vb_load(tile + 16 + 16 * j);
        d = vd_dot_u(d, vb_low(both), q + 8 * j);
        d = vd_dot_u(d, vb_high(both), q + 8 * j + 4);
    }
    sum = vf_fma(vf_of_int(vd_end_u(d)), vf_mul(factor, vf_set1(scale[0])), sum);
    return vf_fma(minimum, vf_set1(scale[1]), sum);
}

/* The same of q8. */
PVR_INLINE vf weights_block_q8(const uint32_t *tile, const uint8_t *quants, vf sum) {
    const int8_t *q = (const int8_t *)quants;
    const float *scale = (const float *)(quants + WEIGHTS_BLOCK);
    const int32_t *start = (const int32_t *)(scale + 2);
    vf factor, none;
    vf_half2(tile, &factor, &none);
    vd d = vd_start_s(start[0]);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
        d = vd_dot_s(d, vb_signed(vb_load(tile + 16 + 16 * j)), q + 4 * j);
    return vf_fma(vf_of_int(vd_end_s(d)), vf_mul(factor, vf_set1(scale[0])), sum);
}

/* sums[r] = the tile at tiles[r] times the same column, in q4 or q8 (a constant). From one place a core
 * waits for memory: it fetches ahead only so far, and to the end of a page; at several places that are far
 * from each other it does so in each. Six are the best on Zen 4: q4 is 12 to 20 % faster so than from one in
 * pages of 2 MiB, 16 to 50 % in those of 4 KiB, where q8 is 8 to 12 % faster (as fast in large ones). Eight
 * are no faster than one, and tiles that follow each other slower. One block is done after the other: side by
 * side they need more registers than there are. */
PVR_INLINE void weights_tiles(uint32_t fmt, const uint32_t *const *tiles, size_t blocks,
                              const uint8_t *quants, vf *sums) {
    for (int r = 0; r < WEIGHTS_RUNS; r++)
        sums[r] = vf_set1(0);
    for (size_t b = 0; b < blocks; b++, quants += 44)
#pragma GCC unroll 8
        for (int r = 0; r < WEIGHTS_RUNS; r++)
            sums[r] = fmt == PVR_Q4 ? weights_block_q4(tiles[r] + b * WEIGHTS_Q4, quants, sums[r])
                                    : weights_block_q8(tiles[r] + b * WEIGHTS_Q8, quants, sums[r]);
}

#endif

/* The same for halves, with the activations as they are: x[t] is token t's row. Meanwhile the cache
 * fetches what lies at `ahead`, `step` bytes for each k: with several tokens a line of weights lasts so
 * long that the CPU's own prefetching comes too late, and with one or two it does better alone. The
 * loop stays as it is: unrolled, GCC 12 converts early between products, which costs 5 %. */
PVR_INLINE void weights_tile_f16(const uint32_t *tile, size_t k, const float *const *x,
                                 size_t tokens, uintptr_t ahead, size_t step, vf *sums) {
    const uint16_t *w = (const uint16_t *)tile;
    for (size_t t = 0; t < tokens; t++)
        sums[t] = vf_set1(0);
    for (size_t i = 0; i < k; i++, w += LANES, ahead += step) {
        if (tokens > 2)
            __builtin_prefetch((const void *)ahead);
        vf column = vf_half(w);
#pragma GCC unroll 8
        for (size_t t = 0; t < tokens; t++)
            sums[t] = vf_fma(column, vf_set1(x[t][i]), sums[t]);
    }
}

/* Writes 16 rows, of which `rows` are there. */
PVR_INLINE void weights_store(float *y, vf sum, size_t rows, uint32_t accumulate) {
    if (accumulate)
        sum = vf_add(sum, vf_load_n(y, rows));
    vf_store_n(y, sum, rows);
}

#endif
