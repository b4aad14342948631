/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "chroma.h"
#include "network.h"

enum { INPUTS = 5 };

static void fill(const pvr_strips *s, const pvr_call *call, int y, int x0, int n, float *to) {
    const pvr_chroma g = {
        .bits = s->bits, .step = s->by, .component = s->component, .stride = s->stride,
        .luma_stride = call->push[10], .src = call->buf[1], .luma = call->buf[2],
        .scale = 1.0f / (s->bits == 8 ? 255.0f : 65535.0f),
    };
    pvr_chroma_row(&g, call->buf[0], y, x0, n, s->xs, to);
}

PVR_OP(nsr_chroma) {
    pvr_network g = {.strips = pvr_plan_strips(call, team, WIN_STEP, WIN_ROWS, WIN_GROUP)};
    pvr_strips *s = &g.strips;
    s->inputs = INPUTS;
    s->fill = fill;
    s->plane = PVR_C_WIDTH;
    s->target = 4;
    s->by = (int)call->push[8];
    s->component = (int)call->push[9];
    s->across = (size_t)s->scale;
    s->outs = ((size_t)(s->scale * s->scale) + 3) / 4 * 4;
    const float *w = call->buf[3], *layers[STRIP_MOST_LAYERS];
    for (size_t i = 0; i < s->layers; i++) {
        layers[i] = w;
        w += ((i ? s->channels : INPUTS) * 9 + 2) * (i + 1 < s->layers ? s->channels : s->outs);
    }
    memcpy(s->base, w, sizeof *w * 25 * (size_t)(s->scale * s->scale));
    pvr_run_network(&g, layers, call, team);
}
