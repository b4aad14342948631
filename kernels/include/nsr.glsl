// SPDX-License-Identifier: Apache-2.0
// What the forms of nsr share: what they bind, the rows of luma on chip, the way out.
#ifndef NSR_GLSL
#define NSR_GLSL

layout(push_constant) uniform Push {
    uint bits, stride, out_stride, tw, th, channels, layers, scale;
} push;
layout(std430, set = 0, binding = 1) readonly buffer Src { uint src[]; };
layout(std430, set = 0, binding = 2) readonly buffer W { vec4 w[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Dst { uint dst[]; };

const uint OUT4 = CHANNELS / 4, LUMA_ROWS = 16u;
shared vec4 luma[LUMA_ROWS * (COLUMNS / 4)];

uint wide;  // columns of the window, in fours

// What a workgroup does: the core's corner in the tile, the band and the frame, and its size.
uint strip_left, strip_top, frame_left, frame_top, cols, lines;

// False where there is nothing to do. `fours`: columns that there is room for, in fours.
bool place_strip(uint fours) {
    const uint n = push.layers, unit = push.scale == 3u ? 4u : 2u, tile = gl_WorkGroupID.z;
    wide = min(COLUMNS / 4u, fours);
    const uint strip = (4u * wide - 2u * n) / unit * unit;
    const uint segment = (push.th + gl_NumWorkGroups.y - 1u) / gl_NumWorkGroups.y;
    strip_left = gl_WorkGroupID.x * strip, strip_top = gl_WorkGroupID.y * segment;
    frame_left = (pvr_param(COL0) + tile) * push.tw + strip_left;
    frame_top = pvr_param(BAND_Y) + strip_top;
    if (tile >= pvr_n_tokens() || strip_left >= push.tw || strip_top >= push.th) return false;
    if (frame_left >= pvr_param(WIDTH) || frame_top >= pvr_param(HEIGHT)) return false;
    cols = min(min(strip, push.tw - strip_left), pvr_param(WIDTH) - frame_left);
    lines = min(min(segment, push.th - strip_top), pvr_param(HEIGHT) - frame_top);
    return true;
}

// Rows first .. first + ROWS - 1 of the window, which begins `layers` rows and columns before the
// core; outside of the frame its border repeats.
void load_luma(uint first) {
    const int x0 = int(frame_left) - int(push.layers), y0 = int(frame_top) - int(push.layers);
    const int right = int(pvr_param(WIDTH)) - 1, bottom = int(pvr_param(HEIGHT)) - 1;
    const float unit = 1.0 / (push.bits == 8u ? 255.0 : 65535.0);
    for (uint i = gl_LocalInvocationID.x; i < ROWS * wide; i += PVR_WG_X) {
        const uint row = first + i / wide, xv = i % wide;
        const uint y = uint(clamp(y0 + int(row), 0, bottom)) - pvr_param(SRC_Y);
        vec4 v;
        for (int j = 0; j < 4; j++) {
            const uint x = uint(clamp(x0 + int(4u * xv) + j, 0, right));
            const uint word = src[y * push.stride + word_at(x, push.bits)];
            v[j] = unit * float(sample_of(word, x, push.bits));
        }
        luma[(row % LUMA_ROWS) * wide + xv] = v;
    }
}

// Four columns of a row; those behind the window's last are any.
vec4 luma_four(uint row, uint xv) {
    return luma[min((row % LUMA_ROWS) * wide + xv, LUMA_ROWS * (COLUMNS / 4) - 1u)];
}
float luma_at(uint row, uint x) { return luma_four(row, x / 4u)[x & 3u]; }

vec4 prelu(vec4 v, vec4 slope) { return mix(slope * v, v, greaterThan(v, vec4(0.0))); }

void put(uint row, uint word, uint value) {
    if (word < push.out_stride) dst[row * push.out_stride + word] = value;
}

// A row of output under four core pixels from frame column x on: map `from` + b of pixel p is
// sample s * p + b. Words that begin at pixel `end` or beyond are another strip's.
void emit(vec4 maps[4], const uint s, const uint from, uint row, uint x, uint end) {
    const float top = push.bits == 8u ? 255.0 : 65535.0;
    uint q[16];
    for (uint p = 0u; p < 4u; p++)
        for (uint b = 0u; b < s; b++) q[s * p + b] = quantise(maps[from + b][p] * top, top);
    if (push.bits == 8u) {
        for (uint i = 0u; i < s; i++)
            if (x + 4u * i / s < end)
                put(row, s * x / 4u + i,
                    q[4u * i] | q[4u * i + 1u] << 8 | q[4u * i + 2u] << 16 | q[4u * i + 3u] << 24);
    } else {
        for (uint i = 0u; i < 2u * s; i++)
            if (x + 2u * i / s < end)
                put(row, s * x / 2u + i, q[2u * i] | q[2u * i + 1u] << 16);
    }
}

// Groups of four maps in the last layer.
uint map_groups() { return push.scale == 2u ? 1u : push.scale; }

// From sums of the last layer to samples: four maps of a group for four pixels from core column x
// (in the strip) on, in core row `line`. `at`: the last layer's weights.
void finish(vec4 acc[4], uint at, uint group, uint line, uint x) {
    const uint groups = map_groups(), n = push.layers;
    const vec4 slope = w[at + (CHANNELS * 9u + 1u) * groups + group];
    for (int o = 0; o < 4; o++) acc[o] = prelu(acc[o], vec4(slope[o]));
    const uint filters = at + (CHANNELS * 9u + 2u) * groups + 25u * group;
    for (uint i = 0u; i < 5u; i++) {
        float v[8];
        for (uint j = 0u; j < 8u; j++) v[j] = luma_at(line + n - 2u + i, x + n - 2u + j);
        for (int j = 0; j < 5; j++) {
            const vec4 k = w[filters + 5u * i + j];
            for (int o = 0; o < 4; o++) acc[o] += k[o] * vec4(v[j], v[j + 1], v[j + 2], v[j + 3]);
        }
    }
    const uint y = push.scale * (strip_top + line), end = frame_left + cols;
    x += frame_left;
    if (push.scale == 2u) {
        emit(acc, 2u, 0u, y, x, end);
        emit(acc, 2u, 2u, y + 1u, x, end);
    } else if (push.scale == 3u) {
        emit(acc, 3u, 0u, y + group, x, end);
    } else {
        emit(acc, 4u, 0u, y + group, x, end);
    }
}

#endif
