// SPDX-License-Identifier: Apache-2.0
// Attention of one head and token by one workgroup of 32: blocks of 32 positions, softmax as they
// come. For the scores an invocation takes a position; for the sums of V it takes words (two
// neighbours) of the head.
#ifndef PVR_ATTENTION_GLSL
#define PVR_ATTENTION_GLSL

#include "attention_io.glsl"

shared vec4 attention_q[64];
shared vec2 attention_sum[128];
shared float attention_score[32];
shared float attention_weight[32];

const float ATTENTION_LEAST = -3.0e38;

void attention(uint head, uint token, uint end) {
    uint lane = gl_LocalInvocationID.x;
    uint quads = push.dim >> 2, words = push.dim >> 1;
    uint cache = (head / (push.heads / push.kv_heads)) * push.ctx;
    uint q0 = (token * (push.heads + 2u * push.kv_heads) + head) * quads;
    for (uint i = lane; i < quads; i += 32u)
        attention_q[i] = qkv[q0 + i] * push.scale;
    for (uint i = lane; i < words; i += 32u)
        attention_sum[i] = vec2(0.0);
    barrier();

    float most = ATTENTION_LEAST, norm = 0.0;  // norm: of this invocation's positions alone
    for (uint p0 = attention_begin(end); p0 < end; p0 += 32u) {
        uint p = p0 + lane;
        float score = ATTENTION_LEAST;
        if (p < end) {
            uint k0 = (cache + p) * quads;
            score = 0.0;
            for (uint i = 0u; i < quads; i++) {
                uvec2 k = keys[k0 + i];
                score += dot(attention_q[i], vec4(unpackHalf2x16(k.x), unpackHalf2x16(k.y)));
            }
            score = attention_cap(score);
        }
        attention_score[lane] = score;
        barrier();
        float before = most;
        for (uint i = 0u; i < 32u; i++)
            most = max(most, attention_score[i]);
        float shrink = exp(before - most);
        float weight = p < end ? exp(score - most) : 0.0;
        norm = norm * shrink + weight;
        attention_weight[lane] = weight;
        barrier();
        uint count = min(32u, end - p0);
        for (uint i = lane; i < words; i += 32u) {
            vec2 sum = vec2(0.0);
            uint v0 = (cache + p0) * words + i;
            for (uint j = 0u; j < count; j++)
                sum += attention_weight[j] * unpackHalf2x16(values[v0 + j * words]);
            attention_sum[i] = attention_sum[i] * shrink + sum;
        }
    }

    // The scores were read for the last time before the loop's second barrier.
    attention_score[lane] = norm;
    barrier();
    float total = 0.0;
    for (uint i = 0u; i < 32u; i++)
        total += attention_score[i];
    uint out0 = (token * push.heads + head) * words;
    for (uint i = lane; i < words; i += 32u)
        result[out0 + i] = attention_sum[i] / total;
}

#endif
