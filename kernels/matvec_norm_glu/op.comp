// SPDX-License-Identifier: Apache-2.0
// The gated unit of two products with a vector that is normalised (kernels/include/matvec.glsl).
#version 450
#define MATVEC_NORM
#define MATVEC_GATED
#include "matvec.glsl"
