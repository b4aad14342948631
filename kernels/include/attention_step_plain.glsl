// SPDX-License-Identifier: Apache-2.0
// attention_step by a workgroup of 32 a head, without subgroups: the token itself first, then blocks
// of 32 positions, softmax as they come. Grid: heads over x.

#define STEP_WORD uvec2
#include "attention_step_io.glsl"

shared vec4 step_q[32], step_k[32];
shared float step_score[32], step_weight[32];

void main() {
    uint head = gl_WorkGroupID.x, lane = gl_LocalInvocationID.x, quads = push.dim >> 2;
    uint each = push.heads / push.kv_heads, kv_head = head / each, pos = pvr_pos0();
    uint row0 = kv_head * push.ctx;
    vec4 value = vec4(0.0);
    if (lane < quads) {
        uint key = (push.heads + kv_head) * quads;
        step_q[lane] = step_turned(head * quads, lane) * push.scale;
        step_k[lane] = step_kept(step_turned(key, lane));
        value = step_kept(qkv[key + push.kv_heads * quads + lane]);
        if (head % each == 0u) {
            keys[(row0 + pos) * quads + lane] = step_halves(step_k[lane]);
            values[(row0 + pos) * quads + lane] = step_halves(value);
        }
    }
    barrier();
    float most = 0.0;
    for (uint i = 0u; i < quads; i++)
        most += dot(step_q[i], step_k[i]);
    most = attention_cap(most);
    float norm = lane == 0u ? 1.0 : 0.0;  // of this invocation's positions alone
    vec4 sum = value;
    for (uint p0 = attention_begin(pos + 1u); p0 < pos; p0 += 32u) {
        uint p = p0 + lane;
        float score = ATTENTION_LEAST;
        if (p < pos) {
            score = 0.0;
            for (uint i = 0u; i < quads; i++)
                score += dot(step_q[i], step_floats(keys[(row0 + p) * quads + i]));
            score = attention_cap(score);
        }
        step_score[lane] = score;
        barrier();
        float before = most;
        for (uint i = 0u; i < 32u; i++)
            most = max(most, step_score[i]);
        float shrink = exp(before - most);
        float weight = p < pos ? exp(score - most) : 0.0;
        norm = norm * shrink + weight;
        step_weight[lane] = weight;
        barrier();
        uint count = min(32u, pos - p0);
        sum *= shrink;
        if (lane < quads)
            for (uint j = 0u; j < count; j++)
                sum += step_weight[j] * step_floats(values[(row0 + p0 + j) * quads + lane]);
    }
    // The scores were read for the last time before the loop's second barrier.
    step_score[lane] = norm;
    barrier();
    float total = 0.0;
    for (uint i = 0u; i < 32u; i++)
        total += step_score[i];
    if (lane < quads)
        qkv[head * quads + lane] = sum / total;
}
