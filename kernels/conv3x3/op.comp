// SPDX-License-Identifier: Apache-2.0
// An invocation does 4 pixels of a row and OC output channels: the window of one channel and row
// is two vec4.
#version 450
#include "pvr.glsl"

layout(push_constant) uniform Push { uint cin, cout, rows, xs, x_tile, y_tile; } push;
layout(std430, set = 0, binding = 1) readonly buffer X { vec4 x[]; };
layout(std430, set = 0, binding = 2) readonly buffer W { vec4 w[]; };
layout(std430, set = 0, binding = 3) writeonly buffer Y { vec4 y[]; };

void main() {
    const uint xv = gl_GlobalInvocationID.x, row = gl_GlobalInvocationID.y;
    const uint sets = push.cout / OC, tile = gl_GlobalInvocationID.z / sets;
    const uint set = gl_GlobalInvocationID.z % sets;
    const uint xs4 = push.xs / 4u, cout4 = push.cout / 4u;
    if (xv >= xs4 || tile >= pvr_n_tokens()) return;

    vec4 acc[OC];
    const uint tail = push.cin * 9u * cout4 + set * (OC / 4);
    for (int o = 0; o < OC; o++) acc[o] = vec4(w[tail + o / 4][o % 4]);
    const uint line = tile * (push.x_tile / 4u) + row * push.cin * xs4 + xv;
    for (uint c = 0u; c < push.cin; c++) {
        uint at = c * 9u * cout4 + set * (OC / 4);
        for (uint a = 0u; a < 3u; a++) {
            const uint i = line + (a * push.cin + c) * xs4;
            const vec4 p = x[i], q = x[i + 1u];
            const vec4 taps[3] = vec4[3](p, vec4(p.yzw, q.x), vec4(p.zw, q.xy));
            for (int b = 0; b < 3; b++) {
                for (int g = 0; g < OC / 4; g++) {
                    const vec4 k = w[at + g];
                    for (int o = 0; o < 4; o++) acc[4 * g + o] += k[o] * taps[b];
                }
                at += cout4;
            }
        }
    }
    const uint out4 = tile * (push.y_tile / 4u) + (row * push.cout + set * OC) * xs4 + xv;
    for (int o = 0; o < OC; o++) {
        const float slope = w[tail + cout4 + o / 4][o % 4];
        y[out4 + o * xs4] = mix(slope * acc[o], acc[o], greaterThan(acc[o], vec4(0.0)));
    }
}
