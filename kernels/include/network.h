/* SPDX-License-Identifier: Apache-2.0 */
/* A network as a stream of rows in float32: of each layer's input the four last rows are kept,
 * transformed (conv_winograd.h). */
#ifndef PVR_NETWORK_H
#define PVR_NETWORK_H

#include "conv_winograd.h"
#include "strip.h"

typedef struct {
    const float *u, *bias, *slope; /* u: transformed weights */
} pvr_layer;

typedef struct {
    pvr_strips strips;
    pvr_layer layers[STRIP_MOST_LAYERS];
    float *rings[STRIP_MOST_LAYERS]; /* WIN_HIGH rows of each layer's input */
    size_t ring[STRIP_MOST_LAYERS];  /* floats of one */
    float *next;
} pvr_network;

static inline float *pvr_ring_row(const pvr_network *g, size_t layer, size_t row) {
    return g->rings[layer] + row % WIN_HIGH * g->ring[layer];
}

static void pvr_layer_row(const void *of, size_t at, size_t row, size_t columns) {
    const pvr_network *g = of;
    const pvr_strips *s = &g->strips;
    const pvr_layer *l = &g->layers[at];
    const int last = at + 1 == s->layers;
    for (size_t i = row ? row + WIN_ROWS : row; at == 0 && i < row + WIN_HIGH; i++)
        pvr_win_enter(pvr_luma_row(s, i), s->inputs, s->xs, columns, pvr_ring_row(g, 0, i));
    const pvr_win_row r = {
        .x = {pvr_ring_row(g, at, row), pvr_ring_row(g, at, row + 1), pvr_ring_row(g, at, row + 2),
              pvr_ring_row(g, at, row + 3)},
        .u = l->u, .bias = l->bias, .slope = l->slope, .cin = at ? s->channels : s->inputs,
        .cout = last ? s->outs : s->channels, .next = last ? NULL : g->next,
        .y = last ? s->maps : pvr_ring_row(g, at + 1, row), /* row is even: the next one lies behind it */
        .pitch = s->xs, .row = last ? s->outs * s->xs : g->ring[at + 1],
    };
    pvr_win_conv(&r, columns);
}

/* Runs a network over the tiles of the slice. w: of each layer [cin][9][cout], bias, slope. The strips'
 * filters are set. */
static inline void pvr_run_network(pvr_network *g, const float *const w[], const pvr_call *call,
                                   pvr_team *team) {
    pvr_strips *s = &g->strips;
    const size_t n = s->layers, c = s->channels, next = WIN_ROWS * c * 2 * VL;
    const size_t inputs = c * (n - 1) + s->inputs;
    const size_t rings = WIN_HIGH * pvr_win_floats(inputs, s->xs);
    const size_t weights = WIN_POINTS * WIN_HIGH * (c * ((n - 2) * c + s->outs) + s->inputs * c);
    const size_t each = (rings + next + weights + pvr_strip_floats(s) + 64 + 15) / 16 * 16;
    float *all = pvr_scratch(team, (size_t)team->n * each * sizeof *all);
    if (!all) return;
    float *at = all + (size_t)team->tid * each;
    for (size_t i = 0; i < n; i++) {
        g->rings[i] = at;
        g->ring[i] = pvr_win_floats(i ? c : s->inputs, s->xs);
        at += WIN_HIGH * g->ring[i];
    }
    g->next = at;
    float *u = at + next;
    pvr_place_strips(s, u + weights);
    for (size_t i = 0; i < n; i++) {
        const size_t cin = i ? c : s->inputs, cout = i + 1 < n ? c : s->outs;
        const float *bias = w[i] + 9 * cin * cout;
        g->layers[i] = (pvr_layer){u, bias, bias + cout};
        pvr_win_weights(w[i], cin, cout, u);
        u += WIN_POINTS * WIN_HIGH * cin * cout;
    }
    pvr_stream(s, call, team, pvr_layer_row, g);
}

#endif
