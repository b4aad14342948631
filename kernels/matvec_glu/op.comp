// SPDX-License-Identifier: Apache-2.0
// A matrix times the gated unit of two vectors (kernels/include/matvec.glsl).
#version 450
#define MATVEC_GLU
#include "matvec.glsl"
