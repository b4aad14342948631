// SPDX-License-Identifier: Apache-2.0
// The body of matvec and of what becomes one with it; to be included behind #version.
//
// A workgroup takes a tile of 16 rows: an invocation four rows (so that what it loads of x serves
// four times) and every eighth block along k; the eight parts are added in shared memory.
// Grid: n / 16 over x and y.
// With WIDE an invocation takes eight elements of four rows in every so-manieth block, so that
// neighbours read what lies side by side and a large GPU has enough of them.
// With PACKED_INT8 or PACKED_HALF activations are rounded into shared memory, some blocks at a time,
// and an invocation takes whole blocks of four rows, or of f16 eight elements of eight rows; it
// asks for its next words before it works on those that it has. Of many rows a workgroup takes
// several tiles, one after the other, for activations that are rounded once.
// With DIRECT see matvec_direct.glsl.
// With MATVEC_NORM or MATVEC_GLU activations are made of what is in memory as they are taken; a
// norm's factor is one number, so that it meets the sums and not the activations. With MATVEC_GATED
// a workgroup takes the tile of the gate and that of the unit, and writes what they make.
#ifndef PVR_MATVEC_GLSL
#define PVR_MATVEC_GLSL

#if defined(PACKED_INT8) || defined(PACKED_HALF)
#define PACKED
#define WIDE
#define WIDE_SUBGROUP
#extension GL_EXT_control_flow_attributes : require
#endif
#if defined(WIDE_SUBGROUP)
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif
#include "pvr.glsl"
#define WEIGHTS_BINDING 1
#define WEIGHTS_QUADS
#if defined(PACKED)
#define WEIGHTS_UVEC4
#endif
#include "weights.glsl"

layout(std430, set = 0, binding = 2) readonly buffer X { vec4 x[]; };

#if defined(DIRECT)
#define SIDES 2u  // of shared memory, for sums of tiles in turn
#else
#define SIDES 1u
#endif

// taken(i) gives four activations; where `counts` is false they are given another time.
#if defined(MATVEC_NORM)

layout(push_constant) uniform Push {
    uint fmt; uint n; uint k; uint accumulate; uint y0; float eps;
#if defined(MATVEC_GATED)
    uint act; uint up;
#endif
} push;
layout(std430, set = 0, binding = 3) readonly buffer Norm { vec4 norm[]; };
layout(std430, set = 0, binding = 4) buffer Y { float y[]; };

float squares = 0.0;  // of what this invocation took, the sum
shared float squared[PVR_WG_X * SIDES];  // the same of all, beside `parts`

vec4 taken(uint i, bool counts) {
    vec4 v = x[pvr_last_row() * (push.k >> 2) + i];
    squares += counts ? dot(v, v) : 0.0;
    return v * norm[i];
}

float norm_factor(float sum) { return inversesqrt(sum / float(push.k) + push.eps); }

#elif defined(MATVEC_GLU)

#include "glu.glsl"

layout(push_constant) uniform Push {
    uint fmt; uint n; uint k; uint accumulate; uint y0; uint act;
} push;
layout(std430, set = 0, binding = 3) buffer Y { float y[]; };

vec4 taken(uint i, bool counts) { return glu(x[i], x[(push.k >> 2) + i], push.act); }

#else

layout(push_constant) uniform Push { uint fmt; uint n; uint k; uint accumulate; uint y0; } push;
layout(std430, set = 0, binding = 3) buffer Y { float y[]; };

vec4 taken(uint i, bool counts) { return x[i]; }

#endif

#if defined(MATVEC_GATED)
#include "glu.glsl"
const uint PASSES = 2u;  // over a tile: the gate, the unit
float gate;  // of this invocation's row
uint tile_of(uint tile, uint pass) { return pass == 0u ? tile : tile + (push.up >> 4); }
#else
const uint PASSES = 1u;
uint tile_of(uint tile, uint pass) { return tile; }
#endif

shared vec4 parts[PVR_WG_X * SIDES];  // sums of four rows each, the quads of rows in turn

// Writes an element of y. `sum`: of the squares, where there is a norm.
void finish_total(uint row, float total, float sum, uint pass) {
#if defined(MATVEC_NORM)
    total *= norm_factor(sum);
#endif
#if defined(MATVEC_GATED)
    if (pass == 0u) {
        gate = total;
        return;
    }
    total = glu(vec4(gate), vec4(total), push.act).x;
#endif
    uint yi = push.y0 + row;
    y[yi] = push.accumulate != 0u ? y[yi] + total : total;
}

// Writes an element of y from `count` parts from `from` on.
void finish_row(uint row, uint lane, uint from, uint count, uint pass) {
    float total = 0.0, sum = 0.0;
    for (uint i = lane >> 2; i < count; i += 4u)
        total += parts[from + i][lane & 3u];
#if defined(MATVEC_NORM)
    for (uint i = lane >> 2; i < count; i += 4u)
        sum += squared[from + i];
#endif
    finish_total(row, total, sum, pass);
}

#if defined(WIDE)

uint wide_lane() {
#if defined(WIDE_SUBGROUP)
    return gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
#else
    return gl_LocalInvocationID.x;
#endif
}

// Adds the sums of all invocations and writes the tile's rows; an invocation has those of the quad
// lane & 3. The parts lie from `from` on.
void finish(vec4 sum, uint lane, uint tile, uint pass, uint from) {
    uint count = PVR_WG_X;  // parts that are left
#if defined(WIDE_SUBGROUP)
    uint size = gl_SubgroupSize;
    for (uint step = 4u; step < size; step <<= 1)
        sum += subgroupShuffleXor(sum, step);
#if defined(DIRECT)
    if (gl_NumSubgroups == 1u) {  // nobody to wait for
        float squares_of_all = 0.0;
#if defined(MATVEC_NORM)
        squares_of_all = squares;
        for (uint step = 1u; step < size; step <<= 1)
            squares_of_all += subgroupShuffleXor(squares_of_all, step);
#endif
        vec4 quad = subgroupShuffle(sum, (lane >> 2) & 3u);
        uint own_row = tile * 16u + lane;
        if (lane < 16u && own_row < push.n)
            finish_total(own_row, quad[lane & 3u], squares_of_all, pass);
        return;
    }
#endif
    uint each = min(size, 4u), part = gl_SubgroupInvocationID;
    if (part < each)
        parts[from + gl_SubgroupID * each + part] = sum;
#if defined(MATVEC_NORM)
    float own = squares;
#if defined(PACKED)  // four neighbours took different ones, elsewhere they take the same
    own += subgroupShuffleXor(own, 1u);
    own += subgroupShuffleXor(own, 2u);
#endif
    for (uint step = 4u; step < size; step <<= 1)
        own += subgroupShuffleXor(own, step);
    if (part < each)
        squared[from + gl_SubgroupID * each + part] = own;
#endif
    count = gl_NumSubgroups * each;
    barrier();
#else
    parts[lane] = sum;
#if defined(MATVEC_NORM)
    squared[lane] = squares;
#endif
    barrier();
    for (count >>= 1; count >= 32u; count >>= 1) {
        if (lane < count) {
            parts[lane] += parts[lane + count];
#if defined(MATVEC_NORM)
            squared[lane] += squared[lane + count];
#endif
        }
        barrier();
    }
    count <<= 1;
#endif
    uint row = tile * 16u + lane;
    if (lane < 16u && row < push.n)
        finish_row(row, lane, from, count, pass);
}

#if defined(PACKED)

#include "packed.glsl"

#if defined(DIRECT)
const uint CHUNK = DIRECT_CHUNK;
#else
const uint CHUNK = 256u;  // blocks of x in shared memory
#endif
shared uvec4 rounded[CHUNK * PACKED_WORDS * 2u];
shared vec2 steps[CHUNK];  // of a block the step, and its sum

#if !defined(DIRECT)

// Rounds four elements, number `i` of the chunk; eight neighbours have a block.
void round_four(vec4 v, uint i) {
    vec4 size = abs(v);
    float most = max(max(size.x, size.y), max(size.z, size.w)), sum;
    for (uint other = 1u; other < 8u; other <<= 1)
        most = max(most, subgroupShuffleXor(most, other));
    vec2 step = packed_step(most);
#if defined(PACKED_INT8)
    rounded[i >> 2][i & 3u] = packed_round(v, step.y, sum);
#else
    uvec2 words = packed_round(v, step.y, sum);
    uint at = (i & 1u) * 2u;
    rounded[i >> 1][at] = words.x;
    rounded[i >> 1][at + 1u] = words.y;
#endif
    for (uint other = 1u; other < 8u; other <<= 1)
        sum += subgroupShuffleXor(sum, other);
    if ((i & 7u) == 0u)
        steps[i >> 3] = vec2(step.x, step.x * sum);
}

// Rounds the blocks from `base` on; an invocation asks for sixteen elements before it waits.
void stage(uint base, uint lane) {
    uint end = min((push.k >> 5) - base, CHUNK) * 8u;
    for (uint first = lane; first < end; first += 4u * PVR_WG_X) {
        vec4 v[4];
        [[unroll]] for (uint j = 0u; j < 4u; j++)
            v[j] = taken(base * 8u + min(first + j * PVR_WG_X, end - 1u),
                         first + j * PVR_WG_X < end);
        [[unroll]] for (uint j = 0u; j < 4u; j++)
            if (first + j * PVR_WG_X < end)
                round_four(v[j], first + j * PVR_WG_X);
    }
}

#endif

#if defined(FMT_F16)

// Eight elements of eight rows: a part of a block.
const uint WORDS = 8u, APART = 2u, PARTS = 4u, STEP = PVR_WG_X / 2u, AHEAD = 1u;
struct Unit { uvec4 words[WORDS]; };

uint unit_first(uint lane) { return (lane >> 2) * 2u + (lane & 1u); }
uint unit_origin(uint tile, uint lane) {
    return tile * (push.k >> 5) * WEIGHTS_BLOCK + (lane >> 1 & 1u);
}

Unit fetch(uint at) {
    Unit unit;
    [[unroll]] for (uint i = 0u; i < WORDS; i++)
        unit.words[i] = weights[at + i * APART];
    return unit;
}

void add(Unit unit, uint part, inout vec4 low, inout vec4 high) {
    uvec4 pairs = rounded[part];
    f16vec2 sums[4] = {f16vec2(0.0), f16vec2(0.0), f16vec2(0.0), f16vec2(0.0)};
    [[unroll]] for (uint i = 0u; i < WORDS; i++) {
        // Elements 0..7 are x0, y0, x1, y1, z0, w0, z1, w1 of the pairs.
        f16vec2 pair = packed_half2(pairs[(i >> 2) * 2u + (i & 1u)]);
        f16vec2 value = f16vec2((i & 2u) == 0u ? pair.x : pair.y);
        [[unroll]] for (uint r = 0u; r < 4u; r++)
            sums[r] += packed_half2(unit.words[i][r]) * value;
    }
    float step = steps[part >> 2].x;
    low += step * vec4(sums[0], sums[1]);
    high += step * vec4(sums[2], sums[3]);
}

// Of its eight rows an invocation keeps those of the quad lane & 3; its neighbour has the others.
vec4 joined(vec4 low, vec4 high, uint lane) {
    bool upper = (lane & 1u) != 0u;
    return (upper ? high : low) + subgroupShuffleXor(upper ? low : high, 1u);
}

#else

// A block of four rows.
#if defined(FMT_Q4)
const uint WORDS = 4u;
#else
const uint WORDS = 8u;
#endif
#if defined(FMT_Q4)
const uint AHEAD = 2u;
#else
const uint AHEAD = 1u;
#endif
const uint PARTS = 1u, STEP = PVR_WG_X / 4u;
struct Unit { uvec4 head, words[WORDS]; };

uint unit_first(uint lane) { return lane >> 2; }
uint unit_origin(uint tile, uint lane) { return weights_quad(tile * 4u + (lane & 3u), push.k); }

Unit fetch(uint at) {
    Unit unit;
    unit.head = weights[at];
    [[unroll]] for (uint i = 0u; i < WORDS; i++)
        unit.words[i] = weights[at + 4u + 4u * i];
    return unit;
}

void add(Unit unit, uint part, inout vec4 low, inout vec4 high) {
    vec4 scale, minimum;
    weights_scales_of(unit.head, scale, minimum);
    vec2 step = steps[part];
#if defined(PACKED_INT8)
    uvec4 first = rounded[part * 2u], second = rounded[part * 2u + 1u];
    ivec4 sums = ivec4(0);
    [[unroll]] for (uint i = 0u; i < WORDS; i++) {
        uvec4 q = unit.words[i];
        [[unroll]] for (uint r = 0u; r < 4u; r++) {
#if defined(FMT_Q4)
            uvec4 v = i < 2u ? first : second;
            uint at = (i & 1u) * 2u;
            sums[r] += packed_dot(q[r] & 0x0f0f0f0fu, v[at]);
            sums[r] += packed_dot(q[r] >> 4 & 0x0f0f0f0fu, v[at + 1u]);
#else
            sums[r] += packed_dot(q[r], i < 4u ? first[i & 3u] : second[i & 3u]);
#endif
        }
    }
    low += step.x * scale * vec4(sums) + step.y * minimum;
#else
    vec4 sums = vec4(0.0);
    [[unroll]] for (uint j = 0u; j < 4u; j++) {
        uvec4 v = rounded[part * 4u + j];
        [[unroll]] for (uint r = 0u; r < 4u; r++) {
#if defined(FMT_Q4)
            sums[r] += packed_dot_q4(unit.words[j][r], v);
#else
            sums[r] += packed_dot_q8(unit.words[2u * j][r], unit.words[2u * j + 1u][r], v);
#endif
        }
    }
#if defined(FMT_Q4)
    minimum += 8.0 * scale;
#endif
    low += step.x * scale * sums + step.y * minimum;
#endif
}

vec4 joined(vec4 low, vec4 high, uint lane) { return low; }

#endif

#if defined(DIRECT)
#include "matvec_direct.glsl"
#else

// Adds up a tile. `again`: the activations are in shared memory already.
vec4 product(uint tile, uint lane, bool again) {
    uint blocks = push.k >> 5, count = blocks * PARTS;
    uint origin = unit_origin(tile, lane), number = unit_first(lane);
    const uint size = WEIGHTS_BLOCK / PARTS;
    vec4 low = vec4(0.0), high = vec4(0.0);
    Unit units[AHEAD + 1u];
    [[unroll]] for (uint i = 0u; i < AHEAD; i++)
        units[i] = fetch(origin + min(number + i * STEP, count - 1u) * size);
    for (uint base = 0u; base < blocks; base += CHUNK) {
        if (!again) {
            if (base != 0u)
                barrier();
            stage(base, lane);
            barrier();
        }
        for (uint end = min(base + CHUNK, blocks) * PARTS; number < end; number += STEP) {
            units[AHEAD] = fetch(origin + min(number + AHEAD * STEP, count - 1u) * size);
            add(units[0], number - base * PARTS, low, high);
            [[unroll]] for (uint i = 0u; i < AHEAD; i++)
                units[i] = units[i + 1u];
        }
    }
    return joined(low, high, lane);
}

void main() {
    uint first = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint apart = gl_NumWorkGroups.x * gl_NumWorkGroups.y, lane = wide_lane();
    bool whole = push.k <= 32u * CHUNK;
    for (uint tile = first; tile * 16u < push.n; tile += apart) {
        for (uint pass = 0u; pass < PASSES; pass++) {
            bool again = tile != first || pass != 0u;
            if (again)
                barrier();  // what finish read is written again
#if defined(MATVEC_NORM)
            if (!whole)
                squares = 0.0;
#endif
            finish(product(tile_of(tile, pass), lane, whole && again), lane, tile, pass, 0u);
        }
    }
}

#endif

#else

const uint BLOCKS = PVR_WG_X / 16u;  // of a step: four invocations along k for each of four quads

void main() {
    uint tile = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint lane = wide_lane();
    uint j = (lane >> 2) & 3u, first = lane >> 4;
    if (tile * 16u >= push.n)
        return;
    for (uint pass = 0u; pass < PASSES; pass++) {
        uint quad = tile_of(tile, pass) * 4u + (lane & 3u);
        uint at = weights_quad(quad, push.k) + first * WEIGHTS_BLOCK;
        vec4 sum = vec4(0.0);
        for (uint block = first; block < push.k >> 5; block += BLOCKS) {
            mat4 a, b;
            vec4 scale, minimum;
            vec4 xa = taken(block * 8u + 2u * j, pass == 0u);
            vec4 xb = taken(block * 8u + 2u * j + 1u, pass == 0u);
            weights_eights(at, j, a, b);
            weights_scales(at, scale, minimum);
            sum += scale * (xa * a + xb * b);
#if WEIGHTS_MINIMUM
            sum += minimum * dot(xa + xb, vec4(1.0));
#endif
            at += BLOCKS * WEIGHTS_BLOCK;
        }
        if (pass != 0u)
            barrier();  // what finish read is written again
        finish(sum, lane, tile, pass, 0u);
    }
}

#endif

#else

const uint SLICES = 8u;

void main() {
    uint tile = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint lane = gl_LocalInvocationID.x;
    uint slice = lane >> 2;
    if (tile * 16u >= push.n)
        return;
    for (uint pass = 0u; pass < PASSES; pass++) {
        uint quad = tile_of(tile, pass) * 4u + (lane & 3u);
        uint at = weights_quad(quad, push.k) + slice * WEIGHTS_BLOCK;
        vec4 sum = vec4(0.0);
        for (uint block = slice; block < push.k >> 5; block += SLICES) {
            vec4 products = vec4(0.0), ones = vec4(0.0), scale, minimum;
            for (uint j = 0u; j < 4u; j++) {
                mat4 a, b;
                weights_eights(at, j, a, b);
                vec4 xa = taken(block * 8u + 2u * j, pass == 0u);
                vec4 xb = taken(block * 8u + 2u * j + 1u, pass == 0u);
                products += xa * a + xb * b;
#if WEIGHTS_MINIMUM
                ones += xa + xb;
#endif
            }
            weights_scales(at, scale, minimum);
            sum += scale * products;
#if WEIGHTS_MINIMUM
            sum += minimum * dot(ones, vec4(1.0));
#endif
            at += SLICES * WEIGHTS_BLOCK;
        }
        if (pass != 0u)
            barrier();  // the gate's parts were read
        parts[lane] = sum;
#if defined(MATVEC_NORM)
        squared[lane] = squares;
#endif
        barrier();
        uint row = tile * 16u + lane;
        if (lane < 16u && row < push.n)
            finish_row(row, lane, 0u, 4u * SLICES, pass);
    }
}

#endif

#endif
