/* SPDX-License-Identifier: Apache-2.0 */
/* A network as a stream of rows in float32: of each layer's input the four last rows are kept,
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
    float *rings; /* WIN_HIGH rows of each later layer's input */
    float *split; /* WIN_HIGH rows of the first layer's input, as `rows` */
    float *rows;  /* two rows of a layer's result by columns of a tile: [channel][WIN_STEP][pitch] */
    size_t pitch, ring;
} pvr_network;

static inline float *pvr_ring_row(const pvr_network *g, size_t layer, size_t row) {
    return g->rings + (WIN_HIGH * (layer - 1) + row % WIN_HIGH) * g->ring;
}

static inline float *pvr_split_row(const pvr_network *g, size_t row) {
    return g->split + row % WIN_HIGH * g->strips.inputs * WIN_STEP * g->pitch;
}

static void pvr_layer_row(const void *of, size_t at, size_t row, size_t columns) {
    const pvr_network *g = of;
    const pvr_strips *s = &g->strips;
    const pvr_layer *l = &g->layers[at];
    const int last = at + 1 == s->layers;
    const size_t width = WIN_STEP * s->channels * g->pitch;
    if (at == 0) {
        for (size_t i = row ? row + WIN_ROWS : row; i < row + WIN_HIGH; i++)
            pvr_win_split(pvr_luma_row(s, i), s->inputs, s->xs, columns + 2, pvr_split_row(g, i), g->pitch);
        for (size_t i = 0; i < WIN_ROWS; i++) {
            const pvr_win_first r = {
                .x = {pvr_split_row(g, row + i), pvr_split_row(g, row + i + 1), pvr_split_row(g, row + i + 2)},
                .w = l->w, .y = g->rows + i * width, .cin = s->inputs, .cout = s->channels, .pitch = g->pitch,
            };
            pvr_win_direct(&r, columns);
        }
    } else {
        const pvr_win_row r = {
            .x = {pvr_ring_row(g, at, row), pvr_ring_row(g, at, row + 1), pvr_ring_row(g, at, row + 2),
                  pvr_ring_row(g, at, row + 3)},
            .u = l->u, .bias = l->bias, .slope = l->slope,
            .y = last ? s->maps : g->rows, .pitch = last ? s->xs : g->pitch, .row = last ? s->outs * s->xs : width,
            .cin = s->channels, .cout = last ? s->outs : s->channels, .phases = !last,
        };
        pvr_win_conv(&r, columns);
    }
    for (size_t i = 0; i < WIN_ROWS && !last; i++)
        pvr_win_transform(g->rows + i * width, s->channels, g->pitch, columns - 2, pvr_ring_row(g, at + 1, row + i));
}

/* Runs a network over the tiles of the slice. w: of each layer [cin][9][cout], bias, slope. The strips'
 * filters are set. */
static inline void pvr_run_network(pvr_network *g, const float *const w[], const pvr_call *call,
                                   pvr_team *team) {
    pvr_strips *s = &g->strips;
    const size_t n = s->layers, c = s->channels;
    g->ring = pvr_win_floats(c, s->xs);
    g->pitch = s->xs / WIN_STEP + 2 * VL;
    const size_t rings = WIN_HIGH * (n - 1) * g->ring;
    const size_t weights = WIN_POINTS * WIN_HIGH * c * ((n - 2) * c + s->outs);
    const size_t rows = WIN_ROWS * WIN_STEP * c * g->pitch, split = WIN_HIGH * WIN_STEP * s->inputs * g->pitch;
    const size_t each = (rings + rows + split + weights + pvr_strip_floats(s) + 64 + 15) / 16 * 16;
    float *all = pvr_scratch(team, (size_t)team->n * each * sizeof *all);
    if (!all) return;
    g->rings = all + (size_t)team->tid * each;
    g->rows = g->rings + rings;
    g->split = g->rows + rows;
    float *u = g->split + split;
    pvr_place_strips(s, u + weights);
    for (size_t i = 0; i < n; i++) {
        const size_t cin = i ? c : s->inputs, cout = i + 1 < n ? c : s->outs;
        const float *bias = w[i] + 9 * cin * cout;
        g->layers[i] = (pvr_layer){w[i], u, bias, bias + cout};
        if (i) {
            pvr_win_weights(w[i], cin, cout, u);
            u += WIN_POINTS * WIN_HIGH * cin * cout;
        }
    }
    pvr_stream(s, call, team, pvr_layer_row, g);
}

#endif
