/* SPDX-License-Identifier: Apache-2.0 */
/* Stage 0: blocks are shared out over the team. Stage 1: one thread. */
#include <math.h>

#include "lanes.h"

enum { TOP = 64, BLOCK = 1024, PART = 4 };
#define NONE 0xffffffffu
#define LEAST 0xff800000u /* -inf */

typedef struct found {
    uint32_t id, bits;
    float top, sum;
} found;

/* exp(x - top) that is 1 at x = top even where both are infinite. */
static float weight_of(float x, float top) { return x == top ? 1.0f : expf(x - top); }

/* Takes a logit, or what was found of others, in; numbers before NaN, the first of equals. */
static void join(found *all, const found *one) {
    const float a = pvr_float(all->bits), b = pvr_float(one->bits);
    const int first = all->id == NONE || (isnan(a) && !isnan(b)) || b > a;
    if (one->id == NONE)
        return;
    if (first) {
        all->id = one->id;
        all->bits = one->bits;
    }
    if (one->sum > 0) {
        const float top = one->top > all->top ? one->top : all->top;
        all->sum = (all->sum > 0 ? all->sum * weight_of(all->top, top) : 0) +
                   one->sum * weight_of(one->top, top);
        all->top = top;
    }
}

PVR_OP(best) {
    const size_t v = call->push[0], blocks = (v + BLOCK - 1) / BLOCK;
    const uint32_t *logits = call->buf[1];
    uint32_t *part = call->buf[2], *out = call->buf[3];
    const found none = {NONE, LEAST, pvr_float(LEAST), 0};
    if (call->push[1] == 0) {
        size_t begin, end;
        pvr_split(team, blocks, &begin, &end);
        for (size_t b = begin; b < end; b++) {
            found all = none;
            for (size_t i = b * BLOCK; i < v && i < (b + 1) * BLOCK; i++) {
                const float x = pvr_float(logits[i]);
                const found one = {(uint32_t)i, logits[i], x, isnan(x) ? 0.0f : 1.0f};
                join(&all, &one);
            }
            part[b * PART] = all.id;
            part[b * PART + 1] = all.bits;
            part[b * PART + 2] = pvr_bits(all.top);
            part[b * PART + 3] = pvr_bits(all.sum);
        }
        return;
    }
    if (team->tid)
        return;
    found all = none;
    for (size_t b = 0; b < blocks; b++) {
        const uint32_t *p = part + b * PART;
        const found one = {p[0], p[1], pvr_float(p[2]), pvr_float(p[3])};
        join(&all, &one);
    }
    for (size_t i = 0; i < TOP; i++) {
        out[2 * i] = i ? NONE : all.id;
        out[2 * i + 1] = i ? LEAST : all.bits;
    }
    out[2 * TOP] = pvr_bits(all.top);
    out[2 * TOP + 1] = pvr_bits(all.sum > 0 ? all.top + logf(all.sum) : all.top);
}
