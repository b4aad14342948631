// SPDX-License-Identifier: Apache-2.0
// attention_step by subgroups: eight neighbours take a position, eight elements of it (and of a head
// of more than 64 the next eights) each, for TOGETHER query heads that share keys; they keep a
// softmax of their own, and nobody waits for another before the end. Keys and values are asked for
// at once. Positions are split over workgroups where they are many; the last that is done joins what
// all have left in scratch memory (flash decoding). Grid: KV heads times groups of query heads over
// x, SPLITS over y.

#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require

#define STEP_WORD uvec4
#include "attention_step_io.glsl"

const uint SLOTS = PVR_WG_X / 8u;  // positions at a time
const uint MOST_GROUPS = 4096u;
const uint QUADS = 32u;  // of a head, at most
const uint PLACES = PVR_WG_X / 8u;  // for what a subgroup has of a head

// `done` counts the workgroups of a group of heads that have left their records. A record of a head
// and split: (most, norm, -, -), then the sums of V.
layout(std430, set = 0, binding = 5) coherent buffer Scratch {
    uint done[MOST_GROUPS];
    vec4 records[];
};

shared vec4 step_q[TOGETHER * QUADS], step_k[QUADS], step_v[QUADS];
shared vec4 step_parts[PLACES * (QUADS + 1u)];
shared uint step_turn;

// Of the elements of a position that this invocation takes, the keys and the values.
struct Row { uvec4 k[2], v[2]; };

// `place` is where the rows of the KV head begin.
Row row_at(uint p, uint part, uint eights, uint place) {
    Row row;
    uint at = place + min(p, push.ctx - 1u) * eights;
    row.k[0] = keys[at + min(part, eights - 1u)];
    row.v[0] = values[at + min(part, eights - 1u)];
    row.k[1] = row.v[1] = uvec4(0u);
    if (eights > 8u) {
        row.k[1] = keys[at + min(8u + part, eights - 1u)];
        row.v[1] = values[at + min(8u + part, eights - 1u)];
    }
    return row;
}

vec4 q[TOGETHER][4], sums[TOGETHER][4];
float most[TOGETHER], norm[TOGETHER];

// Takes a position in; one that is not `there` changes nothing.
void take(vec4 k[4], vec4 v[4], bool there) {
    float scores[TOGETHER];
    [[unroll]] for (uint h = 0u; h < TOGETHER; h++) {
        float score = dot(q[h][0], k[0]) + dot(q[h][1], k[1]);
        scores[h] = score + dot(q[h][2], k[2]) + dot(q[h][3], k[3]);
    }
    [[unroll]] for (uint other = 1u; other < 8u; other <<= 1)
        [[unroll]] for (uint h = 0u; h < TOGETHER; h++)
            scores[h] += subgroupShuffleXor(scores[h], other);
    [[unroll]] for (uint h = 0u; h < TOGETHER; h++) {
        float score = there ? attention_cap(scores[h]) : ATTENTION_LEAST;
        float top = max(most[h], score), shrink = exp(most[h] - top);
        float weight = there ? exp(score - top) : 0.0;
        most[h] = top;
        norm[h] = norm[h] * shrink + weight;
        [[unroll]] for (uint i = 0u; i < 4u; i++)
            sums[h][i] = sums[h][i] * shrink + weight * v[i];
    }
}

void take_row(Row row, bool there) {
    vec4 k[4], v[4];
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        uvec4 key = row.k[i >> 1], value = row.v[i >> 1];
        k[i] = step_floats((i & 1u) == 0u ? key.xy : key.zw);
        v[i] = there ? step_floats((i & 1u) == 0u ? value.xy : value.zw) : vec4(0.0);
    }
    take(k, v, there);
}

void main() {
    uint group = gl_WorkGroupID.x, split = gl_WorkGroupID.y;
    uint lane = gl_SubgroupID * gl_SubgroupSize + gl_SubgroupInvocationID;
    uint slot = lane >> 3, part = lane & 7u, quads = push.dim >> 2, eights = push.dim >> 3;

    uint each = push.heads / push.kv_heads, groups = (each + TOGETHER - 1u) / TOGETHER;
    uint kv_head = group / groups, first = kv_head * each + group % groups * TOGETHER;
    uint count = min(TOGETHER, (kv_head + 1u) * each - first);

    // Positions in the cache; the token's own is the last workgroup's, besides.
    uint pos = pvr_pos0(), begin = attention_begin(pos + 1u), n = pos - begin;
    uint splits = clamp((n + LEAST_SPAN - 1u) / LEAST_SPAN, 1u, SPLITS);
    uint span = max(1u, (n + splits - 1u) / splits);
    splits = max(1u, (n + span - 1u) / span);
    if (split >= splits)
        return;
    uint from = begin + split * span, to = min(pos, from + span);
    bool last = split + 1u == splits;

    uint place = kv_head * push.ctx * eights;
#define ROW(p) row_at(p, part, eights, place)
    Row next[AT_ONCE];
    [[unroll]] for (uint i = 0u; i < AT_ONCE; i++)
        next[i] = ROW(from + i * SLOTS + slot);

    for (uint i = lane; i < (TOGETHER + 2u) * quads; i += PVR_WG_X) {
        uint h = i / quads, quad = i % quads;
        if (h < TOGETHER)
            step_q[h * QUADS + quad] =
                h < count ? step_turned((first + h) * quads, quad) * push.scale : vec4(0.0);
        else if (h == TOGETHER)
            step_k[quad] = step_kept(step_turned((push.heads + kv_head) * quads, quad));
        else
            step_v[quad] =
                step_kept(qkv[(push.heads + push.kv_heads + kv_head) * quads + quad]);
    }
    barrier();
    if (last && first == kv_head * each && lane < eights) {
        uint at = place + pos * eights + lane;
        keys[at] = uvec4(step_halves(step_k[2u * lane]), step_halves(step_k[2u * lane + 1u]));
        values[at] = uvec4(step_halves(step_v[2u * lane]), step_halves(step_v[2u * lane + 1u]));
    }
    vec4 own_k[4], own_v[4];
    [[unroll]] for (uint i = 0u; i < 4u; i++) {
        uint quad = 2u * (part + 8u * (i >> 1)) + (i & 1u);
        bool there = quad < quads;
        own_k[i] = there ? step_k[min(quad, QUADS - 1u)] : vec4(0.0);
        own_v[i] = there ? step_v[min(quad, QUADS - 1u)] : vec4(0.0);
        [[unroll]] for (uint h = 0u; h < TOGETHER; h++) {
            q[h][i] = there ? step_q[h * QUADS + min(quad, QUADS - 1u)] : vec4(0.0);
            sums[h][i] = vec4(0.0);
        }
    }
    [[unroll]] for (uint h = 0u; h < TOGETHER; h++) {
        most[h] = ATTENTION_LEAST;
        norm[h] = 0.0;
    }
    take(own_k, own_v, last && slot == 0u);
    for (uint p = from; p < to; p += AT_ONCE * SLOTS) {
        Row rows[AT_ONCE];
        [[unroll]] for (uint i = 0u; i < AT_ONCE; i++) {
            rows[i] = next[i];
            if (p + AT_ONCE * SLOTS < to)
                next[i] = ROW(p + (AT_ONCE + i) * SLOTS + slot);
        }
        [[unroll]] for (uint i = 0u; i < AT_ONCE; i++)
            take_row(rows[i], p + i * SLOTS + slot < to);
    }

    // Of the subgroup, then of all.
    for (uint other = 8u; other < gl_SubgroupSize; other <<= 1) {
        [[unroll]] for (uint h = 0u; h < TOGETHER; h++) {
            float their = subgroupShuffleXor(most[h], other), top = max(most[h], their);
            float mine = exp(most[h] - top), theirs = exp(their - top);
            most[h] = top;
            norm[h] = norm[h] * mine + subgroupShuffleXor(norm[h], other) * theirs;
            [[unroll]] for (uint i = 0u; i < 4u; i++)
                sums[h][i] = sums[h][i] * mine + subgroupShuffleXor(sums[h][i], other) * theirs;
        }
    }
    uint together = min(PLACES / gl_NumSubgroups, TOGETHER);  // heads for which there is room
    for (uint h0 = 0u; h0 < TOGETHER; h0 += together) {
        if (h0 != 0u)
            barrier();
        [[unroll]] for (uint h = 0u; h < TOGETHER; h++) {
            if (gl_SubgroupInvocationID < 8u && h >= h0 && h < h0 + together) {
                uint at = ((h - h0) * gl_NumSubgroups + gl_SubgroupID) * (QUADS + 1u);
                if (part == 0u)
                    step_parts[at] = vec4(most[h], norm[h], 0.0, 0.0);
                [[unroll]] for (uint i = 0u; i < 4u; i++) {
                    uint quad = 2u * (part + 8u * (i >> 1)) + (i & 1u);
                    if (quad < quads)
                        step_parts[at + 1u + quad] = sums[h][i];
                }
            }
        }
        barrier();
        for (uint i = lane; i < together * quads; i += PVR_WG_X) {
            uint h = h0 + i / quads, quad = i % quads;
            if (h >= count)
                continue;
            uint at = i / quads * gl_NumSubgroups * (QUADS + 1u);
            float top = ATTENTION_LEAST, total = 0.0;
            for (uint s = 0u; s < gl_NumSubgroups; s++)
                top = max(top, step_parts[at + s * (QUADS + 1u)].x);
            vec4 sum = vec4(0.0);
            for (uint s = 0u; s < gl_NumSubgroups; s++) {
                vec4 head = step_parts[at + s * (QUADS + 1u)];
                float weight = exp(head.x - top);
                total += weight * head.y;
                sum += weight * step_parts[at + s * (QUADS + 1u) + 1u + quad];
            }
            if (splits == 1u) {
                qkv[(first + h) * quads + quad] = sum / total;
                continue;
            }
            uint record = ((first + h) * SPLITS + split) * (quads + 1u);
            records[record + 1u + quad] = sum;
            if (quad == 0u)
                records[record] = vec4(top, total, 0.0, 0.0);
        }
    }
    if (splits == 1u)
        return;
    memoryBarrierBuffer();
    barrier();
    if (lane == 0u)
        step_turn = atomicAdd(done[group], 1u);
    barrier();
    if (step_turn + 1u < splits)
        return;
    memoryBarrierBuffer();
    if (lane == 0u)
        done[group] = 0u;  // as the next call has to find it
    for (uint i = lane; i < count * quads; i += PVR_WG_X) {
        uint head = first + i / quads, quad = i % quads;
        float top = ATTENTION_LEAST, total = 0.0;
        vec4 sum = vec4(0.0);
        for (uint s = 0u; s < splits; s++) {
            uint record = (head * SPLITS + s) * (quads + 1u);
            vec4 about = records[record], value = records[record + 1u + quad];
            float before = top;
            top = max(top, about.x);
            float shrink = exp(before - top), weight = exp(about.x - top);
            total = total * shrink + weight * about.y;
            sum = sum * shrink + weight * value;
        }
        qkv[head * quads + quad] = sum / total;
    }
}
