// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a head and a token. Grid: heads over x, tokens over y.
#version 450
#include "pvr.glsl"
#include "attention.glsl"

void main() {
    uint token = gl_WorkGroupID.y;
    if (token < pvr_n_tokens())
        attention(gl_WorkGroupID.x, token, pvr_pos0() + token + 1u);
}
