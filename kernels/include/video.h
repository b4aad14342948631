/* SPDX-License-Identifier: Apache-2.0 */
/* What the video operations share in C: words of the parameter buffer (kernels/video.py), the
 * widest float vector. */
#ifndef PVR_VIDEO_H
#define PVR_VIDEO_H

#include "pvr.h"

enum pvr_video_param {
    PVR_N_TILES = 0, PVR_WIDTH = 4, PVR_HEIGHT = 5, PVR_BAND_Y = 6, PVR_SRC_Y = 7, PVR_COL0 = 8,
    PVR_C_WIDTH = 9, PVR_C_HEIGHT = 10, PVR_C_BAND_Y = 11, PVR_C_SRC_Y = 12, PVR_C_ROWS = 13,
};

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif
/* A vector of VL floats that may lie at any float's address. */
typedef float vf __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));

static inline int pvr_clamp(int v, int top) { return v < 0 ? 0 : v > top ? top : v; }

/* A value on the sample scale, rounded half up and held to 0..top; NaN gives 0 as in GLSL. */
static inline int pvr_quantise(float v, float top) {
    v = v > 0.0f ? v : 0.0f;
    v += 0.5f;
    return (int)(v < top ? v : top);
}

#endif
