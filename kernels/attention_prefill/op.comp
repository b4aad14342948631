// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a head and a token. Grid: heads over x, tokens over y and z; with WIDE see
// attention_flash.glsl, with COOPMAT attention_coopmat.glsl.
#version 450
#include "pvr.glsl"
#if defined(WIDE) || defined(COOPMAT)
#if defined(COOPMAT)
#include "attention_coopmat.glsl"
#else
#include "attention_flash.glsl"
#endif

void main() { attention(gl_WorkGroupID.x, pvr_token_group()); }

#else
#include "attention.glsl"

void main() {
    uint token = pvr_token_group();
    if (token < pvr_n_tokens())
        attention(gl_WorkGroupID.x, token, pvr_pos0() + token + 1u);
}

#endif
