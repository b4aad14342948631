/* SPDX-License-Identifier: Apache-2.0 */
#include "network.h"

PVR_OP(nsr) {
    pvr_network g = {.strips = pvr_plan_strips(call, team, WIN_STEP, WIN_ROWS, WIN_GROUP)};
    pvr_strips *s = &g.strips;
    const float *w = call->buf[2], *layers[STRIP_MOST_LAYERS];
    for (size_t i = 0; i < s->layers; i++) {
        layers[i] = w;
        w += ((i ? s->channels : 1) * 9 + 2) * (i + 1 < s->layers ? s->channels : s->outs);
    }
    pvr_strip_base(s, w);
    pvr_run_network(&g, layers, call, team);
}
