// SPDX-License-Identifier: Apache-2.0
// One token's rotation, its place in the caches and its attention.
#version 450
#include "pvr.glsl"
#if defined(TOGETHER)
#include "attention_step_fast.glsl"
#else
#include "attention_step_plain.glsl"
#endif
