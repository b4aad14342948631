/* SPDX-License-Identifier: Apache-2.0 */
/* A network as a stream of rows in float32: of each layer's input the three last rows are kept,
 * transformed (conv_winograd.h). */
#ifndef PVR_NETWORK_H
#define PVR_NETWORK_H

#include "conv_winograd.h"
#include "strip.h"

typedef struct {
    const float *w, *u, *bias, *slope; /* u: of w, transformed; not of the first layer */
} pvr_layer;

typedef struct {
    pvr_strips strips;
    pvr_layer layers[STRIP_MOST_LAYERS];
    float *rings; /* three rows of each later layer's input */
    float *first; /* a row of the first layer's result */
    float *row;   /* a row of a layer's result by columns of a tile: [channel][WIN_STEP][pitch] */
    size_t pitch, ring;
} pvr_network;

static inline float *pvr_ring_row(const pvr_network *g, size_t layer, size_t row) {
    return g->rings + (3 * (layer - 1) + row % 3) * g->ring;
}

static void pvr_layer_row(const void *of, size_t at, size_t row, size_t columns) {
    const pvr_network *g = of;
    const pvr_strips *s = &g->strips;
    const pvr_layer *l = &g->layers[at];
    const int last = at + 1 == s->layers;
    if (at == 0) {
        const pvr_conv_row r = {
            {pvr_luma_row(s, row), pvr_luma_row(s, row + 1), pvr_luma_row(s, row + 2)},
            l->w, g->first, s->inputs, s->channels, s->xs,
        };
        pvr_conv(&r, columns);
        pvr_win_split(g->first, s->channels, s->xs, columns, g->row, g->pitch);
    } else {
        const pvr_win_row r = {
            .x = {pvr_ring_row(g, at, row), pvr_ring_row(g, at, row + 1), pvr_ring_row(g, at, row + 2)},
            .u = l->u, .bias = l->bias, .slope = l->slope,
            .y = last ? s->maps : g->row, .pitch = last ? s->xs : g->pitch,
            .cin = s->channels, .cout = last ? s->outs : s->channels, .phases = !last,
        };
        pvr_win_conv(&r, columns);
    }
    if (!last) pvr_win_transform(g->row, s->channels, g->pitch, columns - 2, pvr_ring_row(g, at + 1, row));
}

/* Runs a network over the tiles of the slice. w: of each layer [cin][9][cout], bias, slope. The strips'
 * filters are set. */
static inline void pvr_run_network(pvr_network *g, const float *const w[], const pvr_call *call,
                                   pvr_team *team) {
    pvr_strips *s = &g->strips;
    const size_t n = s->layers, c = s->channels;
    g->ring = pvr_win_floats(c, s->xs);
    g->pitch = s->xs / WIN_STEP + 2 * VL;
    const size_t rings = 3 * (n - 1) * g->ring, weights = WIN_POINTS * 3 * c * ((n - 2) * c + s->outs);
    const size_t rows = c * (s->xs + WIN_STEP * g->pitch);
    const size_t each = (rings + rows + weights + pvr_strip_floats(s) + 64 + 15) / 16 * 16;
    float *all = pvr_scratch(team, (size_t)team->n * each * sizeof *all);
    if (!all) return;
    g->rings = all + (size_t)team->tid * each;
    g->row = g->rings + rings;
    g->first = g->row + WIN_STEP * c * g->pitch;
    float *u = g->first + c * s->xs;
    pvr_place_strips(s, u + weights);
    for (size_t i = 0; i < n; i++) {
        const size_t cin = i ? c : s->inputs, cout = i + 1 < n ? c : s->outs;
        const float *bias = w[i] + 9 * cin * cout;
        g->layers[i] = (pvr_layer){w[i], u, bias, bias + cout};
        if (i) {
            pvr_win_weights(w[i], cin, cout, u);
            u += WIN_POINTS * 3 * cin * cout;
        }
    }
    pvr_stream(s, call, team, pvr_layer_row, g);
}

#endif
