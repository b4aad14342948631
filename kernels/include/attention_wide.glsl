// SPDX-License-Identifier: Apache-2.0
// Attention of one head and token by one workgroup of PVR_WG_X, at least 128: blocks of PVR_WG_X
// positions, softmax as they come. For the scores an invocation takes a position; for the sums of V
// it takes a word (two neighbours) of the head at every so-manieth position of the block.
#ifndef PVR_ATTENTION_WIDE_GLSL
#define PVR_ATTENTION_WIDE_GLSL

#include "wide.glsl"

#include "attention_io.glsl"

shared vec4 attention_q[64];
shared float attention_weight[PVR_WG_X];
shared vec2 attention_sum[PVR_WG_X];

const float ATTENTION_LEAST = -3.0e38;

void attention(uint head, uint token, uint end) {
    uint lane = gl_LocalInvocationID.x;
    uint quads = push.dim >> 2, words = push.dim >> 1;
    uint cache = (head / (push.heads / push.kv_heads)) * push.ctx;
    uint q0 = (token * (push.heads + 2u * push.kv_heads) + head) * quads;
    uint slices = PVR_WG_X / words;
    uint slice = lane / words, word = lane % words;
    for (uint i = lane; i < quads; i += PVR_WG_X)
        attention_q[i] = qkv[q0 + i] * push.scale;
    barrier();

    float most = ATTENTION_LEAST, norm = 0.0;  // norm: of this invocation's positions alone
    vec2 sum = vec2(0.0);
    for (uint p0 = attention_begin(end); p0 < end; p0 += PVR_WG_X) {
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
            uint v0 = (cache + p0) * words + word;
            for (uint j = slice; j < count; j += slices)
                sum += attention_weight[j] * unpackHalf2x16(values[v0 + j * words]);
        }
    }

    attention_sum[lane] = sum;
    float total = wide_sum(norm);
    if (lane >= words)
        return;
    for (uint i = 1u; i < slices; i++)
        sum += attention_sum[i * words + lane];
    result[(token * push.heads + head) * words + lane] = sum / total;
}

#endif
