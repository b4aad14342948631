// SPDX-License-Identifier: Apache-2.0
// A workgroup takes a head. Grid: heads over x.
#version 450
#include "pvr.glsl"
#include "attention.glsl"

void main() { attention(gl_WorkGroupID.x, 0u, pvr_pos0() + 1u); }
