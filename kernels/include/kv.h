/* SPDX-License-Identifier: Apache-2.0 */
/* KV caches: rows of halves, or of int8 with scales behind all rows (kernels/kv.py has the form). */
#ifndef PVR_KV_H
#define PVR_KV_H

#include <math.h>

#include "lanes.h"

enum { KV_BLOCK = 32 }; /* elements with a scale of their own */

typedef struct kv_cache {
    size_t dim, scale_halves;
    uint16_t *halves; /* f16 */
    int8_t *bytes;    /* q8 */
    uint16_t *scales; /* q8 */
} kv_cache;

static inline kv_cache kv_open(void *cache, size_t rows, size_t dim) {
    return (kv_cache){
        .dim = dim,
        .scale_halves = (dim + 2 * KV_BLOCK - 1) / (2 * KV_BLOCK) * 2,
        .halves = cache,
        .bytes = cache,
        .scales = (uint16_t *)((int8_t *)cache + rows * dim),
    };
}

/* A scale, which is a normal half. */
PVR_INLINE float kv_scale(uint16_t half) {
    return pvr_float(((uint32_t)half << 13) + (112u << 23));
}

/* Elements d..d+15 of a row, those past its end 0; d is a multiple of 16. */
PVR_INLINE vf kv_load(enum pvr_format fmt, const kv_cache *c, size_t row, size_t d) {
    const size_t n = c->dim - d;
    if (fmt == PVR_F16)
        return vf_half_n(c->halves + row * c->dim + d, n);
    return vf_mul(vf_bytes_n(c->bytes + row * c->dim + d, n),
                  vf_set1(kv_scale(c->scales[row * c->scale_halves + d / KV_BLOCK])));
}

static inline void kv_store(enum pvr_format fmt, const kv_cache *c, size_t row, const float *x) {
    if (fmt == PVR_F16) {
        for (size_t d = 0; d < c->dim; d++)
            c->halves[row * c->dim + d] = pvr_to_half(x[d]);
        return;
    }
    uint16_t *scales = c->scales + row * c->scale_halves;
    for (size_t b = 0; b < c->scale_halves; b++) {
        const size_t begin = b * KV_BLOCK,
                     end = begin + KV_BLOCK < c->dim ? begin + KV_BLOCK : c->dim;
        float most = 0;
        for (size_t d = begin; d < end; d++)
            most = fabsf(x[d]) > most ? fabsf(x[d]) : most;
        most *= 1.0f / 127;
        const uint32_t bits = pvr_bits(most > 0x1p-14f ? most : 0x1p-14f) + 0x1fffu;
        const float inverse = 1 / pvr_float(bits & 0xffffe000u);
        scales[b] = (uint16_t)((bits - (112u << 23)) >> 13);
        for (size_t d = begin; d < end; d++)
            c->bytes[row * c->dim + d] = (int8_t)rintf(x[d] * inverse);
    }
}

#endif
