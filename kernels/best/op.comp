// SPDX-License-Identifier: Apache-2.0
// Each invocation takes every so-manieth logit of a block of 1024, or of the blocks; a tree in shared
// memory joins what they have found. Grid: v / 1024 over x, or 1.
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push { uint v; uint stage; } push;
layout(std430, set = 0, binding = 1) readonly buffer Logits { uint logits[]; };
layout(std430, set = 0, binding = 2) buffer Part { uvec4 part[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Out { uint result[]; };

const uint BLOCK = 1024u, TOP = 64u, NONE = 0xffffffffu, LEAST = 0xff800000u;

#include "topk_keys.glsl"

shared uint keys[PVR_WG_X], ids[PVR_WG_X], bits[PVR_WG_X];
shared float sums[PVR_WG_X];  // of exp(x - the greatest of the invocation's)

// The place of the first of the greatest, and the sum as it counts beside that: for all.
void join(uint lane) {
    barrier();
    for (uint n = PVR_WG_X / 2u; n > 0u; n >>= 1) {
        if (lane < n) {
            uint a = keys[lane], b = keys[lane + n], i = ids[lane], j = ids[lane + n];
            float top = max(top_of(a), top_of(b));
            sums[lane] = (a > 1u ? sums[lane] * weight_of(value_of(a), top) : 0.0) +
                         (b > 1u ? sums[lane + n] * weight_of(value_of(b), top) : 0.0);
            if (b > a || (b == a && j < i)) {
                keys[lane] = b;
                ids[lane] = j;
                bits[lane] = bits[lane + n];
            }
        }
        barrier();
    }
}

void main() {
    uint lane = gl_LocalInvocationID.x;
    uint key = 0u, id = NONE, logit = LEAST;
    float sum = 0.0;
    if (push.stage == 0u) {
        uint first = gl_WorkGroupID.x * BLOCK, end = min(first + BLOCK, push.v);
        for (uint i = first + lane; i < end; i += PVR_WG_X) {
            uint own = key_of(logits[i]);
            if (own > key) {
                key = own;
                id = i;
                logit = logits[i];
            }
        }
        if (key > 1u)
            for (uint i = first + lane; i < end; i += PVR_WG_X)
                if (key_of(logits[i]) > 1u)
                    sum += weight_of(uintBitsToFloat(logits[i]), value_of(key));
    } else {
        float top = top_of(0u);
        for (uint i = lane; i < (push.v + BLOCK - 1u) / BLOCK; i += PVR_WG_X) {
            uvec4 found = part[i];
            uint own = found.x == NONE ? 0u : key_of(found.y);
            float before = top;
            top = max(top, top_of(own));
            sum = (key > 1u ? sum * weight_of(before, top) : 0.0) +
                  (own > 1u ? uintBitsToFloat(found.w) * weight_of(uintBitsToFloat(found.z), top)
                            : 0.0);
            if (own > key || (own == key && found.x < id)) {
                key = own;
                id = found.x;
                logit = found.y;
            }
        }
    }
    keys[lane] = key;
    ids[lane] = id;
    bits[lane] = logit;
    sums[lane] = sum;
    join(lane);
    float top = top_of(keys[0]);
    if (push.stage == 0u) {
        if (lane == 0u)
            part[gl_WorkGroupID.x] = uvec4(ids[0], bits[0], floatBitsToUint(top),
                                           floatBitsToUint(sums[0]));
        return;
    }
    for (uint i = lane; i < 2u * TOP; i += PVR_WG_X)
        if (i > 1u)
            result[i] = (i & 1u) == 0u ? NONE : LEAST;
    if (lane == 0u) {
        result[0] = ids[0];
        result[1] = bits[0];
        result[2u * TOP] = floatBitsToUint(top);
        result[2u * TOP + 1u] = floatBitsToUint(sums[0] > 0.0 ? top + log(sums[0]) : top);
    }
}
