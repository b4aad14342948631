// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a head. Grid: heads over x; with SPLIT see attention_split.glsl.
#version 450
#include "pvr.glsl"
#if defined(SPLIT)
#include "attention_split.glsl"
#elif defined(WIDE)
#include "attention_wide.glsl"
#else
#include "attention.glsl"
#endif

void main() {
#if defined(SPLIT)
    attention(gl_WorkGroupID.x, gl_WorkGroupID.y, pvr_pos0() + 1u);
#else
    attention(gl_WorkGroupID.x, 0u, pvr_pos0() + 1u);
#endif
}
