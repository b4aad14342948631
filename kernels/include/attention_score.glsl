// SPDX-License-Identifier: Apache-2.0
// Which positions count, and what becomes of a score; of push.window and push.softcap.
#ifndef PVR_ATTENTION_SCORE_GLSL
#define PVR_ATTENTION_SCORE_GLSL

const float ATTENTION_LEAST = -3.0e38;

// The first of the positions before `end` that count.
uint attention_begin(uint end) {
    return push.window == 0u || end < push.window ? 0u : end - push.window;
}

// A scaled score under the soft cap. tanh from an exponential that may overflow, as the built-in
// one must not.
float attention_cap(float score) {
    if (push.softcap == 0.0)
        return score;
    return push.softcap * (1.0 - 2.0 / (exp(2.0 * score / push.softcap) + 1.0));
}

#endif
