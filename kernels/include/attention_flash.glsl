// SPDX-License-Identifier: Apache-2.0
// Attention of many tokens, for GPUs with some shared memory (flash attention): a workgroup of 256
// takes 64 rows, a row being a token of a query head of one KV head, over blocks of 64 positions.
// Scores [64 rows, 64 positions] and sums of V [64 rows, 128 elements] are small matrix products,
// of which an invocation has 4 x 4 and 4 x 8 in registers; their operands pass through shared memory
// in steps of 16. A head of more than 128 elements is two workgroups' work, each with all scores.
// Grid: KV heads times parts of 128 elements over x, rows / 64 over y and z.
#ifndef PVR_ATTENTION_FLASH_GLSL
#define PVR_ATTENTION_FLASH_GLSL

#define ATTENTION_OUT vec4
#include "attention_io.glsl"

const uint ROWS = 64u, POSITIONS = 64u, STEP = 16u;
const uint PITCH = 17u;       // of 64 floats in vec4, padded
const uint PART_QUADS = 32u;  // of a head, at most

// Steps of Q and K, transposed, one after the other; or of V.
shared vec4 tile[2u * STEP * PITCH];
shared vec4 weights[POSITIONS * PITCH];  // [position][row], scores at first
shared float part[4][ROWS];
shared vec4 shrinks[ROWS / 4u];

void attention(uint x, uint block) {
    uint lane = gl_LocalInvocationID.x, column = lane & 15u, line = lane >> 4;
    uint own = lane & 63u, quarter = lane >> 6;  // the row whose softmax this is, and which 16 positions
    uint quads = push.dim >> 2, parts = (quads + PART_QUADS - 1u) / PART_QUADS;
    uint kv_head = x / parts, part0 = x % parts * PART_QUADS;
    uint part_quads = min(PART_QUADS, quads - part0);
    uint each = push.heads / push.kv_heads, rows = pvr_n_tokens() * each;
    uint row0 = block * ROWS;
    if (row0 >= rows)
        return;
    uint width = push.heads + 2u * push.kv_heads;
    kv_open(kv_head);

    // Positions that the block's first row begins and its last one ends with.
    uint from = attention_begin(pvr_pos0() + row0 / each + 1u);
    uint to = pvr_pos0() + min(row0 + ROWS - 1u, rows - 1u) / each + 1u;
    uint own_end = row0 + own < rows ? pvr_pos0() + (row0 + own) / each + 1u : 0u;
    uint own_begin = attention_begin(own_end);

    // Which four elements of which row and position this invocation brings into shared memory.
    uint bring = lane >> 2, bring_quad = lane & 3u, bring_row = row0 + bring;
    uint q0 = (bring_row / each * width + kv_head * each + bring_row % each) * quads;

    float most = ATTENTION_LEAST, norm = 0.0;  // norm: of this quarter alone
    vec4 sums[4][2];
    for (uint i = 0u; i < 4u; i++)
        sums[i][0] = sums[i][1] = vec4(0.0);

    for (uint p0 = from; p0 < to; p0 += POSITIONS) {
        vec4 scores[4];
        for (uint i = 0u; i < 4u; i++)
            scores[i] = vec4(0.0);
        for (uint first = 0u; first < quads; first += STEP / 4u) {
            uint at = first + bring_quad;
            vec4 q = vec4(0.0), k = vec4(0.0);
            if (at < quads && bring_row < rows)
                q = qkv[q0 + at] * push.scale;
            if (at < quads && p0 + bring < to)
                k = kv_key(p0 + bring, at);
            barrier();
            for (uint i = 0u; i < 4u; i++) {
                tile[(4u * bring_quad + i) * PITCH + (bring >> 2)][bring & 3u] = q[i];
                tile[(STEP + 4u * bring_quad + i) * PITCH + (bring >> 2)][bring & 3u] = k[i];
            }
            barrier();
            for (uint d = 0u; d < STEP; d++) {
                vec4 a = tile[d * PITCH + line], b = tile[(STEP + d) * PITCH + column];
                for (uint i = 0u; i < 4u; i++)
                    scores[i] += a[i] * b;
            }
        }
        for (uint i = 0u; i < 4u; i++)
            weights[(4u * column + i) * PITCH + line] =
                vec4(scores[0][i], scores[1][i], scores[2][i], scores[3][i]);
        barrier();

        float before = most;
        for (uint i = 16u * quarter; i < 16u * quarter + 16u; i++) {
            float score = attention_cap(weights[i * PITCH + (own >> 2)][own & 3u]);
            bool seen = p0 + i >= own_begin && p0 + i < own_end;
            score = seen ? score : ATTENTION_LEAST;
            weights[i * PITCH + (own >> 2)][own & 3u] = score;
            most = max(most, score);
        }
        part[quarter][own] = most;
        barrier();
        for (uint i = 0u; i < 4u; i++)
            most = max(most, part[i][own]);
        float shrink = exp(before - most);
        norm *= shrink;
        for (uint i = 16u * quarter; i < 16u * quarter + 16u; i++) {
            float score = weights[i * PITCH + (own >> 2)][own & 3u];
            float weight = score > ATTENTION_LEAST ? exp(score - most) : 0.0;
            weights[i * PITCH + (own >> 2)][own & 3u] = weight;
            norm += weight;
        }
        if (quarter == 0u)
            shrinks[own >> 2][own & 3u] = shrink;
        barrier();

        vec4 factor = shrinks[line];
        for (uint i = 0u; i < 4u; i++) {
            sums[i][0] *= factor[i];
            sums[i][1] *= factor[i];
        }
        for (uint first = 0u; first < POSITIONS && p0 + first < to; first += STEP) {
            if (first > 0u)
                barrier();
            for (uint i = lane; i < STEP * PART_QUADS; i += 256u) {
                uint p = p0 + first + i / PART_QUADS, at = i % PART_QUADS;
                tile[i] = at < part_quads && p < to ? kv_value(p, part0 + at) : vec4(0.0);
            }
            barrier();
            for (uint p = 0u; p < STEP; p++) {
                vec4 weight = weights[(first + p) * PITCH + line];
                vec4 low = tile[p * PART_QUADS + column];
                vec4 high = tile[p * PART_QUADS + 16u + column];
                for (uint i = 0u; i < 4u; i++) {
                    sums[i][0] += weight[i] * low;
                    sums[i][1] += weight[i] * high;
                }
            }
        }
    }

    barrier();
    part[quarter][own] = norm;
    barrier();
    for (uint i = 0u; i < 4u; i++) {
        uint row = 4u * line + i, at = row0 + row;
        float total = part[0][row] + part[1][row] + part[2][row] + part[3][row];
        uint out0 = (at / each * push.heads + kv_head * each + at % each) * quads + part0;
        if (at < rows && column < part_quads)
            result[out0 + column] = sums[i][0] / total;
        if (at < rows && column + 16u < part_quads)
            result[out0 + 16u + column] = sums[i][1] / total;
    }
}

#endif
