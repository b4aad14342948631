// SPDX-License-Identifier: Apache-2.0
// Attention of one head and token by one workgroup of PVR_WG_X, at least 64: blocks of PVR_WG_X
// positions, softmax as they come. For the scores an invocation takes a position; for the sums of V
// it takes four neighbours of the head at every so-manieth position of the block.
#ifndef PVR_ATTENTION_WIDE_GLSL
#define PVR_ATTENTION_WIDE_GLSL

#define ATTENTION_OUT vec4
#include "wide.glsl"

#include "attention_io.glsl"

shared vec4 attention_q[64];
shared float attention_weight[PVR_WG_X];
shared vec4 attention_sum[PVR_WG_X];

void attention(uint head, uint token, uint end) {
    uint lane = gl_LocalInvocationID.x, quads = push.dim >> 2;
    kv_open(head / (push.heads / push.kv_heads));
    uint q0 = (token * (push.heads + 2u * push.kv_heads) + head) * quads;
    uint slices = PVR_WG_X / quads;
    uint slice = lane / quads, quad = lane % quads;
    for (uint i = lane; i < quads; i += PVR_WG_X)
        attention_q[i] = qkv[q0 + i] * push.scale;
    barrier();

    float most = ATTENTION_LEAST, norm = 0.0;  // norm: of this invocation's positions alone
    vec4 sum = vec4(0.0);
    for (uint p0 = attention_begin(end); p0 < end; p0 += PVR_WG_X) {
        uint p = p0 + lane;
        float score = ATTENTION_LEAST;
        if (p < end) {
            score = 0.0;
            for (uint i = 0u; i < quads; i++)
                score += dot(attention_q[i], kv_key(p, i));
            score = attention_cap(score);
        }
        float before = most;
        most = max(most, wide_max(score));
        float shrink = exp(before - most);
        float weight = p < end ? exp(score - most) : 0.0;
        norm = norm * shrink + weight;
        // The last block's weights were read before the barriers of wide_max.
        attention_weight[lane] = weight;
        barrier();
        uint count = min(uint(PVR_WG_X), end - p0);
        sum *= shrink;
        if (slice < slices) {
            for (uint j = slice; j < count; j += slices)
                sum += attention_weight[j] * kv_value(p0 + j, quad);
        }
    }

    attention_sum[lane] = sum;
    float total = wide_sum(norm);
    if (lane >= quads)
        return;
    for (uint i = 1u; i < slices; i++)
        sum += attention_sum[i * quads + lane];
    result[(token * push.heads + head) * quads + lane] = sum / total;
}

#endif
