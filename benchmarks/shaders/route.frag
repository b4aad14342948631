// SPDX-License-Identifier: Apache-2.0
// The experts of tokens, as kernels/route chooses them, as pixels: that at (j, t) is expert and share
// of rank j of token t, so that a copy of the target is what `route` writes. PowerVR's fragment
// shaders store nothing else. A pixel looks for its own rank in rounds, of which each finds the best
// after the last.
#version 450
layout(std430, set = 0, binding = 0) readonly buffer Logits { float logits[]; };
layout(location = 0) out uvec2 result;

void main() {
    uint rank = uint(gl_FragCoord.x), base = uint(gl_FragCoord.y) * uint(EXPERTS);
    float last = 3.4e38, most = 0.0;
    uint last_id = 0u;
    for (uint turn = 0u; turn <= rank; turn++) {
        float value = -3.4e38;
        uint id = 0u;
        for (uint e = 0u; e < uint(EXPERTS); e++) {
            float logit = logits[base + e];
            bool later = logit < last || (logit == last && e > last_id);
            if (turn == 0u || later) {
                id = logit > value ? e : id;
                value = max(logit, value);
            }
        }
        last = value;
        last_id = id;
        most = turn == 0u ? value : most;
    }
    float sum = 0.0;
    for (uint e = 0u; e < uint(EXPERTS); e++)
        sum += exp(logits[base + e] - most);
    result = uvec2(last_id, floatBitsToUint(exp(last - most) / sum));
}
