// SPDX-License-Identifier: Apache-2.0
// What the video operations share: words of the parameter buffer (kernels/video.py), samples
// packed in words.
#ifndef VIDEO_GLSL
#define VIDEO_GLSL

const uint WIDTH = 4u, HEIGHT = 5u, BAND_Y = 6u, SRC_Y = 7u, COL0 = 8u;
const uint C_WIDTH = 9u, C_HEIGHT = 10u, C_BAND_Y = 11u, C_SRC_Y = 12u, C_ROWS = 13u;

// Where sample x of a line is, and the sample itself; bits is 8 or 16.
uint word_at(uint x, uint bits) { return bits == 8u ? x >> 2 : x >> 1; }
uint sample_of(uint word, uint x, uint bits) {
    return bits == 8u ? (word >> ((x & 3u) * 8u)) & 0xffu : (word >> ((x & 1u) * 16u)) & 0xffffu;
}

// A value on the sample scale, rounded half up and held to 0..top. NaN gives 0 on every device.
uint quantise(float v, float top) { return v > 0.0 ? uint(min(v + 0.5, top)) : 0u; }

#endif
