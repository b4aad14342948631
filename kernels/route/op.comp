// SPDX-License-Identifier: Apache-2.0
// An invocation takes a rank of a token: in each round it looks for the best after the one found
// last, up to its own. Grid: tokens times ranks over x and y.
// With GROUPED a workgroup takes a token. In each round every invocation looks for the best of its
// share that comes after the one chosen last, and all agree on the best of those. Grid: tokens over
// x and y.
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push { uint experts; uint used; uint norm; } push;
layout(std430, set = 0, binding = 1) readonly buffer Logits { float logits[]; };
layout(std430, set = 0, binding = 2) writeonly buffer Out { uvec2 result[]; };

#if defined(GROUPED)
const float NONE = -3.4e38;
shared float best[PVR_WG_X];
shared uint ids[PVR_WG_X];
shared float sums[PVR_WG_X];

bool before(float a, uint i, float b, uint j) { return a > b || (a == b && i < j); }

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint token = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (token >= pvr_n_tokens())
        return;
    uint base = token * push.experts;
    float most = 0.0, last = 3.4e38, total = 0.0;
    float mine = 0.0;  // the share that this invocation writes: that of round `lane`
    uint last_id = 0u, mine_id = 0u;
    for (uint round = 0u; round < push.used; round++) {
        float value = NONE;
        uint id = 0xffffffffu;
        for (uint e = lane; e < push.experts; e += PVR_WG_X) {
            float logit = logits[base + e];
            if (before(last, last_id, logit, e) && before(logit, e, value, id)) {
                value = logit;
                id = e;
            }
        }
        best[lane] = value;
        ids[lane] = id;
        barrier();
        value = best[0];
        id = ids[0];
        for (uint i = 1u; i < PVR_WG_X; i++) {
            if (before(best[i], ids[i], value, id)) {
                value = best[i];
                id = ids[i];
            }
        }
        barrier();  // all have read before the next round writes
        most = round == 0u ? value : most;
        float share = exp(value - most);
        total += share;
        if (round == lane) {
            mine = share;
            mine_id = id;
        }
        last = value;
        last_id = id;
    }
    if (push.norm == 0u) {
        float sum = 0.0;
        for (uint e = lane; e < push.experts; e += PVR_WG_X)
            sum += exp(logits[base + e] - most);
        sums[lane] = sum;
        barrier();
        total = 0.0;
        for (uint i = 0u; i < PVR_WG_X; i++)
            total += sums[i];
    }
    if (lane < push.used)
        result[token * push.used + lane] = uvec2(mine_id, floatBitsToUint(mine / total));
}

#else

void main() {
    uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint at = group * PVR_WG_X + gl_LocalInvocationID.x, token = at / push.used;
    if (token >= pvr_n_tokens())
        return;
    uint rank = at % push.used, base = token * push.experts;
    // Shares of those that are used need all of them.
    uint rounds = push.norm != 0u ? push.used : rank + 1u;
    float most = 0.0, last = 3.4e38, total = 0.0, mine = 0.0;
    uint last_id = 0u, mine_id = 0u;
    for (uint round = 0u; round < rounds; round++) {
        float value = -3.4e38;
        uint id = 0u;
        for (uint e = 0u; e < push.experts; e++) {
            float logit = logits[base + e];
            bool later = logit < last || (logit == last && e > last_id);
            if (logit > value && (round == 0u || later)) {
                value = logit;
                id = e;
            }
        }
        most = round == 0u ? value : most;
        total += exp(value - most);
        if (round == rank) {
            mine = value;
            mine_id = id;
        }
        last = value;
        last_id = id;
    }
    if (push.norm == 0u) {
        total = 0.0;
        for (uint e = 0u; e < push.experts; e++)
            total += exp(logits[base + e] - most);
    }
    result[at] = uvec2(mine_id, floatBitsToUint(exp(mine - most) / total));
}

#endif
