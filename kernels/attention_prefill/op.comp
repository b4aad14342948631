// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a head and a token. Grid: heads over x, tokens over y and z; with WIDE see
// attention_flash.glsl.
#version 450
#include "pvr.glsl"
#if defined(WIDE)
#include "attention_flash.glsl"

void main() { attention(gl_WorkGroupID.x, pvr_token_group()); }

#else
#include "attention.glsl"

void main() {
    uint token = pvr_token_group();
    if (token < pvr_n_tokens())
        attention(gl_WorkGroupID.x, token, pvr_pos0() + token + 1u);
}

#endif
