// SPDX-License-Identifier: Apache-2.0
// A workgroup streams COLUMNS of luma downwards, ROWS at a step. Each step takes these rows through
// all layers; of each layer's input the two rows before are kept. Results of a layer stay in
// registers until all have read its input, then take its place.
//
// On chip: for each layer but the first two kept rows of input, then ROWS rows of the layer at work
// (halves), and LUMA_ROWS rows of luma. Row `row` of layer k's output is, counted from the first
// that the segment depends on, row first + row - 2 (k + 1): a layer begins when that is there.
#version 450
#if defined(MATRIX)
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_EXT_shader_16bit_storage : require
#extension GL_EXT_control_flow_attributes : require
#endif
#include "pvr.glsl"
#include "video.glsl"
#include "nsr.glsl"

#if defined(MATRIX)
#include "nsr_matrix.glsl"
#else
#include "nsr_plain.glsl"
#endif
