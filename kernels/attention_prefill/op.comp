// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a head and a token. Grid: heads over x, tokens over y and z.
#version 450
#include "pvr.glsl"
#include "attention.glsl"

void main() {
    uint token = pvr_token_group();
    if (token < pvr_n_tokens())
        attention(gl_WorkGroupID.x, token, pvr_pos0() + token + 1u);
}
