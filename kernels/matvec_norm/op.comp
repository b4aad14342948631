// SPDX-License-Identifier: Apache-2.0
// A matrix times a vector that is normalised (kernels/include/matvec.glsl).
#version 450
#define MATVEC_NORM
#include "matvec.glsl"
