// SPDX-License-Identifier: Apache-2.0
// What every op.comp includes first: the workgroup size of its variant and the parameter buffer.
//
// kernels/build_spirv.py compiles op.comp once for each Variant of op.py, with the variant's defines and
// PVR_WG_X, PVR_WG_Y, PVR_WG_Z from its `workgroup`. It also enables GL_GOOGLE_include_directive, so a shader is
//     #version 450
//     #include "pvr.glsl"
//     layout(push_constant) uniform Push { uint k; float eps; } push;
//     layout(std430, set = 0, binding = 1) readonly buffer X { float x[]; };
#ifndef PVR_GLSL
#define PVR_GLSL

layout(local_size_x = PVR_WG_X, local_size_y = PVR_WG_Y, local_size_z = PVR_WG_Z) in;

// Binding 0 of every operation: 16 words that the host writes before a slice.
layout(std140, set = 0, binding = 0) uniform PvrParams { uvec4 words[4]; } pvr_params;

uint pvr_n_tokens() { return pvr_params.words[0].x; }  // tokens (rows) that this slice really has
uint pvr_pos0() { return pvr_params.words[0].y; }      // position of the first of them
uint pvr_last_row() { return pvr_params.words[0].z; }  // the row whose logits are wanted
uint pvr_param(uint i) { return pvr_params.words[i >> 2][i & 3u]; }  // any word, 0..15

// Groups that stand for tokens lie on the axes y and z: one axis may be too short for them.
uint pvr_token_group() { return gl_WorkGroupID.z * gl_NumWorkGroups.y + gl_WorkGroupID.y; }

// Weight formats as push constants carry them (kernels.contract.FORMATS, enum pvr_format).
const uint PVR_F16 = 0u;
const uint PVR_Q8 = 1u;
const uint PVR_Q4 = 2u;
const uint PVR_F32 = 3u;

#endif
