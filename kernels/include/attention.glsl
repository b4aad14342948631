// SPDX-License-Identifier: Apache-2.0
// Attention of one head and token by one workgroup of 32: blocks of 32 positions, softmax as they
// come. For the scores an invocation takes a position; for the sums of V it takes pairs of
// neighbours of the head.
#ifndef PVR_ATTENTION_GLSL
#define PVR_ATTENTION_GLSL

#define KV_PAIRS
#define ATTENTION_OUT vec2
#include "attention_io.glsl"

shared vec4 attention_q[64];
shared vec2 attention_sum[128];
shared float attention_score[32];
shared float attention_weight[32];

void attention(uint head, uint token, uint end) {
    uint lane = gl_LocalInvocationID.x;
    uint quads = push.dim >> 2, pairs = push.dim >> 1;
    kv_open(head / (push.heads / push.kv_heads));
    uint q0 = (token * (push.heads + 2u * push.kv_heads) + head) * quads;
    for (uint i = lane; i < quads; i += 32u)
        attention_q[i] = qkv[q0 + i] * push.scale;
    for (uint i = lane; i < pairs; i += 32u)
        attention_sum[i] = vec2(0.0);
    barrier();

    float most = ATTENTION_LEAST, norm = 0.0;  // norm: of this invocation's positions alone
    for (uint p0 = attention_begin(end); p0 < end; p0 += 32u) {
        uint p = p0 + lane;
        float score = ATTENTION_LEAST;
        if (p < end) {
            score = 0.0;
            for (uint i = 0u; i < quads; i++)
                score += dot(attention_q[i], kv_key(p, i));
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
        for (uint i = lane; i < pairs; i += 32u) {
            vec2 sum = vec2(0.0);
            for (uint j = 0u; j < count; j++)
                sum += attention_weight[j] * kv_value_pair(p0 + j, i);
            attention_sum[i] = attention_sum[i] * shrink + sum;
        }
    }

    // The scores were read for the last time before the loop's second barrier.
    attention_score[lane] = norm;
    barrier();
    float total = 0.0;
    for (uint i = 0u; i < 32u; i++)
        total += attention_score[i];
    uint out0 = (token * push.heads + head) * pairs;
    for (uint i = lane; i < pairs; i += 32u)
        result[out0 + i] = attention_sum[i] / total;
}

#endif
