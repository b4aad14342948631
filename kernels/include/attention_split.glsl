// SPDX-License-Identifier: Apache-2.0
// Attention of one token by many workgroups a KV head, for large GPUs and long contexts: the
// positions are split, each workgroup of 256 takes a span of them for up to 4 query heads that
// share the keys, and the last that is done joins what all have left in scratch memory (flash
// decoding). Grid: KV heads times groups of query heads over x, SPLITS over y.
//
// For the scores 4 invocations take a position; for the softmax 64 invocations take a head; for the
// sums of V an invocation takes four neighbours of the head at every so-manieth position.
#ifndef PVR_ATTENTION_SPLIT_GLSL
#define PVR_ATTENTION_SPLIT_GLSL

#define ATTENTION_OUT vec4
#include "attention_io.glsl"

const uint SPLITS = 32u;      // at most; kernels/attention_decode/op.py knows it
const uint LEAST_SPAN = 64u;  // positions that are worth a workgroup
const uint BLOCK = 256u;      // positions at a time
const uint TOGETHER = 4u;     // query heads
const uint MOST_GROUPS = 4096u;

// `done` counts the workgroups of a group of heads that have left their records. A record of a head
// and split: (most, norm, -, -), then the sums of V.
layout(std430, set = 0, binding = ATTENTION_OUT_BINDING + 1) coherent buffer Scratch {
    uint done[MOST_GROUPS];
    vec4 records[];
};

shared vec4 split_q[TOGETHER * 64u];
shared vec4 split_dots[TOGETHER][BLOCK];  // a score in four parts; then the weight in x
shared vec4 split_sum[256];
shared float split_part[256], split_parts[32];
shared float split_shrink[TOGETHER], split_most[TOGETHER], split_norm[TOGETHER];
shared uint split_turn;

float split_plus(float a, float b) { return a + b; }

// The greatest, or the sum, of what the 64 invocations of a head have, for all of these.
#define SPLIT_REDUCE(name, join)                                \
    float name(uint lane, float x) {                            \
        barrier();                                              \
        split_part[lane] = x;                                   \
        barrier();                                              \
        if ((lane & 7u) == 0u) {                                \
            for (uint i = 1u; i < 8u; i++)                      \
                x = join(x, split_part[lane + i]);              \
            split_parts[lane >> 3] = x;                         \
        }                                                       \
        barrier();                                              \
        uint first = lane >> 6 << 3;                            \
        x = split_parts[first];                                 \
        for (uint i = 1u; i < 8u; i++)                          \
            x = join(x, split_parts[first + i]);                \
        return x;                                               \
    }

SPLIT_REDUCE(split_max_of, max)
SPLIT_REDUCE(split_sum_of, split_plus)

// Sums over the slices of the workgroup, for the first `quads` invocations.
vec4 split_join(uint lane, uint quads, uint slices, vec4 x) {
    barrier();
    split_sum[lane] = x;
    barrier();
    if (lane < quads)
        for (uint i = 1u; i < slices; i++)
            x += split_sum[i * quads + lane];
    return x;
}

void attention(uint group, uint split, uint end) {
    uint lane = gl_LocalInvocationID.x, quads = push.dim >> 2;
    uint slices = 256u / quads, slice = lane / quads, quad = lane % quads;
    uint own = lane >> 6, among = lane & 63u;  // the head whose softmax this is, and who of its 64

    uint each = push.heads / push.kv_heads, groups = (each + TOGETHER - 1u) / TOGETHER;
    uint kv_head = group / groups, first = kv_head * each + group % groups * TOGETHER;
    uint count = min(TOGETHER, (kv_head + 1u) * each - first);

    uint begin = attention_begin(end), n = end - begin;
    uint splits = min((n + LEAST_SPAN - 1u) / LEAST_SPAN, SPLITS);
    uint span = (n + splits - 1u) / splits;
    splits = (n + span - 1u) / span;
    if (split >= splits)
        return;
    uint from = begin + split * span, to = min(end, from + span);

    kv_open(kv_head);
    for (uint i = lane; i < TOGETHER * quads; i += 256u) {
        uint head = i / quads;
        split_q[head * 64u + i % quads] =
            head < count ? qkv[first * quads + i] * push.scale : vec4(0.0);
    }

    float most = ATTENTION_LEAST, norm = 0.0;  // norm: of this invocation's positions alone
    vec4 sums[TOGETHER];
    for (uint h = 0u; h < TOGETHER; h++)
        sums[h] = vec4(0.0);
    for (uint p0 = from; p0 < to; p0 += BLOCK) {
        uint here = min(BLOCK, to - p0);
        barrier();  // the queries are there, the last block's weights were read
        for (uint i = lane >> 2; i < here; i += 64u) {
            float dots[TOGETHER];
            for (uint h = 0u; h < TOGETHER; h++)
                dots[h] = 0.0;
            for (uint j = lane & 3u; j < quads; j += 4u) {
                vec4 key = kv_key(p0 + i, j);
                for (uint h = 0u; h < TOGETHER; h++)
                    dots[h] += dot(split_q[h * 64u + j], key);
            }
            for (uint h = 0u; h < TOGETHER; h++)
                split_dots[h][i][lane & 3u] = dots[h];
        }
        barrier();
        float before = most;
        for (uint i = among; i < here; i += 64u) {
            float score = attention_cap(dot(split_dots[own][i], vec4(1.0)));
            split_dots[own][i].x = score;
            most = max(most, score);
        }
        most = split_max_of(lane, most);
        float shrink = exp(before - most);
        norm *= shrink;
        for (uint i = among; i < here; i += 64u) {
            float weight = exp(split_dots[own][i].x - most);
            split_dots[own][i].x = weight;
            norm += weight;
        }
        if (among == 0u)
            split_shrink[own] = shrink;
        barrier();
        for (uint h = 0u; h < TOGETHER; h++)
            sums[h] *= split_shrink[h];
        if (slice < slices)
            for (uint i = slice; i < here; i += slices) {
                vec4 value = kv_value(p0 + i, quad);
                for (uint h = 0u; h < TOGETHER; h++)
                    sums[h] += split_dots[h][i].x * value;
            }
    }
    norm = split_sum_of(lane, norm);
    if (among == 0u) {
        split_most[own] = most;
        split_norm[own] = norm;
    }
    for (uint h = 0u; h < TOGETHER; h++)
        sums[h] = split_join(lane, quads, slices, sums[h]);

    if (splits == 1u) {
        if (lane < quads)
            for (uint h = 0u; h < count; h++)
                result[(first + h) * quads + lane] = sums[h] / split_norm[h];
        return;
    }
    for (uint h = 0u; h < count; h++) {
        uint at = ((first + h) * SPLITS + split) * (quads + 1u);
        if (lane < quads)
            records[at + 1u + lane] = sums[h];
        if (lane == 0u)
            records[at] = vec4(split_most[h], split_norm[h], 0.0, 0.0);
    }
    memoryBarrierBuffer();
    barrier();
    if (lane == 0u)
        split_turn = atomicAdd(done[group], 1u);
    barrier();
    if (split_turn + 1u < splits)
        return;

    memoryBarrierBuffer();
    if (lane == 0u)
        done[group] = 0u;  // as the next call has to find it
    // A record's share of the whole, by 32 invocations a head.
    uint head = lane >> 5, which = lane & 31u;
    vec4 record = vec4(ATTENTION_LEAST, 0.0, 0.0, 0.0);
    if (head < count && which < splits)
        record = records[((first + head) * SPLITS + which) * (quads + 1u)];
    if (head < TOGETHER)
        split_part[lane] = record.x;
    barrier();
    if (head < TOGETHER) {
        most = ATTENTION_LEAST;
        for (uint i = 0u; i < SPLITS; i++)
            most = max(most, split_part[(head << 5) + i]);
        float weight = exp(record.x - most);
        split_dots[head][which].xy = vec2(weight, weight * record.y);
    }
    barrier();
    for (uint h = 0u; h < count; h++) {
        vec4 sum = vec4(0.0);
        if (slice < slices)
            for (uint i = slice; i < splits; i += slices)
                sum += split_dots[h][i].x *
                       records[((first + h) * SPLITS + i) * (quads + 1u) + 1u + quad];
        sum = split_join(lane, quads, slices, sum);
        norm = 0.0;
        for (uint i = 0u; i < SPLITS; i++)
            norm += split_dots[h][i].y;
        if (lane < quads)
            result[(first + h) * quads + lane] = sum / norm;
    }
}

#endif
