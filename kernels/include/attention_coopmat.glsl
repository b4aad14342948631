// SPDX-License-Identifier: Apache-2.0
// Attention of many tokens by cooperative matrices (flash attention): a workgroup of four subgroups
// takes 32 rows, a row being a token of a query head of one KV head, over blocks of 64 positions.
// Queries, keys, weights and values are halves in shared memory, keys and values 64 elements at a
// time; scores and sums of V are float32. A subgroup has 16 rows of 32 positions, then of 32
// elements of V of each 64. A head of more than 128 elements is two workgroups' work, each with all
// scores. Grid: KV heads times parts of 128 elements over x, rows / 32 over y and z.
#ifndef PVR_ATTENTION_COOPMAT_GLSL
#define PVR_ATTENTION_COOPMAT_GLSL

#extension GL_EXT_control_flow_attributes : require
#include "coopmat.glsl"

#define ATTENTION_OUT float
#include "attention_io.glsl"

const uint ROWS = 32u, POSITIONS = 64u, PART = 128u;
// Between rows in shared memory, in vectors of four or, of scores, floats; so that banks differ.
const uint Q_PITCH = 66u, KV_PITCH = 18u, P_PITCH = 18u, SCORE_PITCH = 68u;

shared f16vec4 queries[ROWS * Q_PITCH];
shared f16vec4 tile[POSITIONS * KV_PITCH];    // keys, then values
shared f16vec4 weights[ROWS * P_PITCH];       // [row][position]
shared float scores[ROWS * SCORE_PITCH];      // [row][position], then products with V
shared float shares[4][ROWS];
shared float shrinks[ROWS];

f16vec4 attention_half(vec4 x) { return f16vec4(clamp(x, -65504.0, 65504.0)); }

void attention(uint x, uint block) {
    uint lane = gl_LocalInvocationID.x;
    uint half_ = coopmat_subgroup() & 1u, side = coopmat_subgroup() >> 1;  // of rows, of 4 matrices
    uint own = lane >> 2, share = lane & 3u;  // the row whose softmax this is, and which 16 positions
    uint quads = push.dim >> 2, parts = (push.dim + PART - 1u) / PART;
    uint kv_head = x / parts, part0 = x % parts * (PART / 4u);  // in quads
    uint each = push.heads / push.kv_heads, rows = pvr_n_tokens() * each;
    uint row0 = block * ROWS;
    if (row0 >= rows)
        return;
    uint width = push.heads + 2u * push.kv_heads;
    kv_open(kv_head);

    for (uint i = lane; i < ROWS * 64u; i += PVR_WG_X) {
        uint row = row0 + i / 64u, quad = i % 64u;
        vec4 q = vec4(0.0);
        if (row < rows && quad < quads)
            q = qkv[(row / each * width + kv_head * each + row % each) * quads + quad] * push.scale;
        queries[i / 64u * Q_PITCH + quad] = attention_half(q);
    }

    // Positions that the block's first row begins and its last one ends with.
    uint from = attention_begin(pvr_pos0() + row0 / each + 1u);
    uint to = pvr_pos0() + min(row0 + ROWS - 1u, rows - 1u) / each + 1u;
    uint own_end = row0 + own < rows ? pvr_pos0() + (row0 + own) / each + 1u : 0u;
    uint own_begin = attention_begin(own_end);

    float most = ATTENTION_LEAST, norm = 0.0;  // norm: of this share of the positions alone
    float sums[4][8];  // of the matrices 2 chunk + j: row lane / 16 + 2 i, column lane % 16
    [[unroll]] for (uint j = 0u; j < 4u; j++)
        [[unroll]] for (uint i = 0u; i < 8u; i++)
            sums[j][i] = 0.0;

    for (uint p0 = from; p0 < to; p0 += POSITIONS) {
        // Two variables: an array of matrices lies in memory where one index of it is not a constant
        // to the driver.
        COOPMAT_SUM products0 = COOPMAT_ZERO;
        COOPMAT_SUM products1 = COOPMAT_ZERO;
        for (uint first = 0u; first < quads; first += 16u) {
            barrier();
            for (uint i = lane; i < POSITIONS * 16u; i += PVR_WG_X) {
                uint p = p0 + i / 16u, quad = first + i % 16u;
                bool there = p < to && quad < quads;
                tile[i / 16u * KV_PITCH + i % 16u] =
                    attention_half(there ? kv_key(p, quad) : vec4(0.0));
            }
            barrier();
            [[unroll]] for (uint k = 0u; k < 16u; k += 4u) {
                COOPMAT_A a;
                coopmat_load_a(a, queries, 16u * half_ * Q_PITCH + first + k, Q_PITCH);
                COOPMAT_B b;
                coopmat_load_b(b, tile, 32u * side * KV_PITCH + k, KV_PITCH);
                coopmat_multiply(a, b, products0);
                coopmat_load_b(b, tile, (32u * side + 16u) * KV_PITCH + k, KV_PITCH);
                coopmat_multiply(a, b, products1);
            }
        }
        uint score0 = 16u * half_ * SCORE_PITCH + 32u * side;
        coopmat_store(products0, scores, score0, SCORE_PITCH);
        coopmat_store(products1, scores, score0 + 16u, SCORE_PITCH);
        barrier();

        float before = most, own_scores[16];
        [[unroll]] for (uint i = 0u; i < 16u; i++) {
            uint p = p0 + 16u * share + i;
            float score = attention_cap(scores[own * SCORE_PITCH + 16u * share + i]);
            own_scores[i] = p >= own_begin && p < own_end ? score : ATTENTION_LEAST;
            most = max(most, own_scores[i]);
        }
        shares[share][own] = most;
        barrier();
        [[unroll]] for (uint i = 0u; i < 4u; i++)
            most = max(most, shares[i][own]);
        float shrink = exp(before - most);
        norm *= shrink;
        [[unroll]] for (uint i = 0u; i < 16u; i += 4u) {
            vec4 weight;
            [[unroll]] for (uint j = 0u; j < 4u; j++) {
                float score = own_scores[i + j];
                weight[j] = score > ATTENTION_LEAST ? exp(score - most) : 0.0;
                norm += weight[j];
            }
            weights[own * P_PITCH + 4u * share + i / 4u] = f16vec4(weight);
        }
        if (share == 0u)
            shrinks[own] = shrink;

        [[unroll]] for (uint chunk = 0u; chunk < 2u; chunk++) {
            uint first = part0 + 16u * chunk;
            if (first < quads) {
                barrier();  // the last tile was read, weights and shrinks are there
                for (uint i = lane; i < POSITIONS * 16u; i += PVR_WG_X) {
                    uint p = p0 + i / 16u, quad = first + i % 16u;
                    bool there = p < to && quad < quads;
                    tile[i / 16u * KV_PITCH + i % 16u] =
                        attention_half(there ? kv_value(p, quad) : vec4(0.0));
                }
                barrier();
                products0 = COOPMAT_ZERO;
                products1 = COOPMAT_ZERO;
                [[unroll]] for (uint k = 0u; k < POSITIONS; k += 16u) {
                    COOPMAT_A a;
                    coopmat_load_a(a, weights, 16u * half_ * P_PITCH + k / 4u, P_PITCH);
                    COOPMAT_B b;
                    coopmat_load_b_rows(b, tile, k * KV_PITCH + 8u * side, KV_PITCH);
                    coopmat_multiply(a, b, products0);
                    coopmat_load_b_rows(b, tile, k * KV_PITCH + 8u * side + 4u, KV_PITCH);
                    coopmat_multiply(a, b, products1);
                }
                uint place = coopmat_subgroup() * 512u;
                coopmat_store(products0, scores, place, 16u);
                coopmat_store(products1, scores, place + 256u, 16u);
                barrier();
                [[unroll]] for (uint j = 0u; j < 2u; j++)
                    [[unroll]] for (uint i = 0u; i < 8u; i++) {
                        uint e = coopmat_lane() + 32u * i;
                        uint at = 2u * chunk + j;
                        sums[at][i] = sums[at][i] * shrinks[16u * half_ + e / 16u] +
                                      scores[place + 256u * j + e];
                    }
            }
        }
    }

    barrier();
    shares[share][own] = norm;
    barrier();
    [[unroll]] for (uint i = 0u; i < 8u; i++) {
        uint row = 16u * half_ + coopmat_lane() / 16u + 2u * i, at = row0 + row;
        float total = shares[0][row] + shares[1][row] + shares[2][row] + shares[3][row];
        uint out0 = (at / each * push.heads + kv_head * each + at % each) * push.dim;
        [[unroll]] for (uint j = 0u; j < 4u; j++) {
            uint element = 4u * part0 + 64u * (j >> 1) + 16u * (2u * side + (j & 1u));
            element += coopmat_lane() % 16u;
            if (at < rows && element < push.dim)
                result[out0 + element] = sums[j][i] / total;
        }
    }
}

#endif
