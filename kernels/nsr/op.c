/* SPDX-License-Identifier: Apache-2.0 */
/* Of each layer's input the three last rows are kept, [row][channel][x]. */
#include "conv.h"
#include "strip.h"

typedef struct {
    pvr_strips strips;
    const float *w[STRIP_MOST_LAYERS]; /* of each layer */
    float *rings;                      /* three rows of each later layer's input */
} network;

static float *ring_row(const network *g, size_t layer, size_t row) {
    return g->rings + (3 * (layer - 1) + row % 3) * g->strips.channels * g->strips.xs;
}

static void layer_row(const void *of, size_t layer, size_t row, size_t columns) {
    const network *g = of;
    const pvr_strips *s = &g->strips;
    const int last = layer + 1 == s->layers;
    pvr_conv_row r = {
        .w = g->w[layer],
        .y = last ? s->maps : ring_row(g, layer + 1, row),
        .cin = layer ? s->channels : 1,
        .cout = last ? s->outs : s->channels,
        .xs = s->xs,
    };
    for (size_t a = 0; a < 3; a++)
        r.x[a] = layer ? ring_row(g, layer, row + a) : pvr_luma_row(s, row + a);
    pvr_conv(&r, columns);
}

PVR_OP(nsr) {
    network g = {.strips = pvr_plan_strips(call, team)};
    pvr_strips *s = &g.strips;
    const float *w = call->buf[2];
    for (size_t i = 0; i < s->layers; i++) {
        g.w[i] = w;
        w += ((i ? s->channels : 1) * 9 + 2) * (i + 1 < s->layers ? s->channels : s->outs);
    }
    pvr_strip_base(s, w);
    const size_t rings = 3 * (s->layers - 1) * s->channels * s->xs;
    const size_t each = pvr_strip_floats(s) + rings + 64;
    float *all = pvr_scratch(team, (size_t)team->n * each * sizeof *all);
    if (!all) return;
    g.rings = all + (size_t)team->tid * each;
    pvr_place_strips(s, g.rings + rings);
    pvr_stream(s, call, team, layer_row, &g);
}
