/* SPDX-License-Identifier: Apache-2.0 */
/* Packed samples of a plane: u8, or little-endian u16. */
#ifndef PVR_SAMPLES_H
#define PVR_SAMPLES_H

#include "pvr.h"

static inline long samples_held(long i, long n) { return i < 0 ? 0 : i >= n ? n - 1 : i; }

static inline float samples_get(const void *line, size_t i, uint32_t bits) {
    return bits == 8 ? (float)((const uint8_t *)line)[i] : (float)((const uint16_t *)line)[i];
}

static inline void samples_put(void *line, size_t i, uint32_t bits, uint32_t value) {
    if (bits == 8) ((uint8_t *)line)[i] = (uint8_t)value;
    else ((uint16_t *)line)[i] = (uint16_t)value;
}

/* Rounded half up and held to 0..top; NaN gives 0. */
static inline uint32_t samples_quantised(float v, float top) {
    v = (v > 0.0f ? v : 0.0f) + 0.5f;
    return (uint32_t)(v < top ? v : top);
}

#endif
