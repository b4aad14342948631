// SPDX-License-Identifier: Apache-2.0
// A matrix times a vector (kernels/include/matvec.glsl).
#version 450
#include "matvec.glsl"
