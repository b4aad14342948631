// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a head. Grid: heads over x.
#version 450
#include "pvr.glsl"
#if defined(WIDE)
#include "attention_wide.glsl"
#else
#include "attention.glsl"
#endif

void main() { attention(gl_WorkGroupID.x, 0u, pvr_pos0() + 1u); }
