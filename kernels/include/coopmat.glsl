// SPDX-License-Identifier: Apache-2.0
// Matrices of 16 x 16 that a subgroup of 32 holds and multiplies together (VK_KHR_cooperative_matrix):
// halves into floats. Include it before anything but pvr.glsl.
#ifndef PVR_COOPMAT_GLSL
#define PVR_COOPMAT_GLSL

#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#pragma use_vulkan_memory_model

#define COOPMAT_A coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
#define COOPMAT_B coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>
#define COOPMAT_SUM coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>
#define COOPMAT_ZERO COOPMAT_SUM(0.0)

// Rows of A, columns of B (or its rows) and rows of a sum lie `stride` elements of the array apart.
// Arrays of uvec4, eight halves to an element, tell the driver that it may read 16 bytes at once.
#define coopmat_load_a(m, from, at, stride) \
    coopMatLoad(m, from, at, stride, gl_CooperativeMatrixLayoutRowMajor)
#define coopmat_load_b(m, from, at, stride) \
    coopMatLoad(m, from, at, stride, gl_CooperativeMatrixLayoutColumnMajor)
#define coopmat_load_b_rows(m, from, at, stride) \
    coopMatLoad(m, from, at, stride, gl_CooperativeMatrixLayoutRowMajor)
#define coopmat_load_sum(m, from, at, stride) \
    coopMatLoad(m, from, at, stride, gl_CooperativeMatrixLayoutRowMajor)
#define coopmat_add(a, sum) sum = sum + a
#define coopmat_multiply(a, b, sum) sum = coopMatMulAdd(a, b, sum)
#define coopmat_store(m, to, at, stride) \
    coopMatStore(m, to, at, stride, gl_CooperativeMatrixLayoutRowMajor)

uint coopmat_subgroup() { return gl_SubgroupID; }
uint coopmat_lane() { return gl_SubgroupInvocationID; }

// Of the subgroup alone, for shared memory of its own.
void coopmat_barrier() { subgroupBarrier(); }

#endif
