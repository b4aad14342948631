/* SPDX-License-Identifier: Apache-2.0 */
/* Of each layer's input the last rows are kept as bytes, [row][channel / 4][x] words: three, or as
 * many as a later layer that adds them has to look back. */
#include "conv.h"
#include "conv_int8.h"
#include "strip.h"

typedef struct {
    const int32_t *w;
    const float *unit, *bias, *slope, *sums;
    const float *inverse, *zero; /* of what it writes */
    int source;          /* the layer whose result it adds, or -1 */
    size_t depth, ring;  /* rows kept of its input, and where they begin, in words */
} layer;

typedef struct {
    pvr_strips strips;
    const float *first; /* weights of the first layer */
    layer layers[STRIP_MOST_LAYERS];
    float *row, *biases; /* a row of the first layer's result; [layers][most channels] */
    int32_t *rings;
    size_t widest;
} network;

static int32_t *ring_row(const network *g, size_t at, size_t row) {
    const layer *l = &g->layers[at];
    return g->rings + l->ring + row % l->depth * g->strips.channels / 4 * g->strips.xs;
}

static void first_row(const network *g, size_t row, size_t columns) {
    const pvr_strips *s = &g->strips;
    const size_t channels = s->channels, xs = s->xs;
    const pvr_conv_row r = {
        {pvr_luma_row(s, row), pvr_luma_row(s, row + 1), pvr_luma_row(s, row + 2)},
        g->first, g->row, 1, channels, xs,
    };
    pvr_conv(&r, columns);
    const float *inverse = g->layers[0].inverse, *zero = g->layers[0].zero;
    int32_t *y = ring_row(g, 1, row);
    for (size_t c = 0; c < channels; c += 4)
        for (size_t x = 0; x < columns; x += VL) {
            vf q[4];
            for (size_t i = 0; i < 4; i++)
                q[i] = *(const vf *)(g->row + (c + i) * xs + x) * inverse[c + i] +
                       (zero[c + i] + 0.5f);
            *(vi *)(y + c / 4 * xs + x) = pvr_kept(q);
        }
}

static void layer_row(const void *of, size_t at, size_t row, size_t columns) {
    const network *g = of;
    const pvr_strips *s = &g->strips;
    if (at == 0) {
        first_row(g, row, columns);
        return;
    }
    const layer *l = &g->layers[at];
    const int last = at + 1 == s->layers;
    pvr_int8_row r = {
        .x = {ring_row(g, at, row), ring_row(g, at, row + 1), ring_row(g, at, row + 2)},
        .w = l->w, .unit = l->unit, .bias = g->biases + at * g->widest, .slope = l->slope,
        .inverse = l->inverse, .zero = l->zero,
        .y = last ? NULL : ring_row(g, at + 1, row),
        .values = last ? s->maps : NULL,
        .cin = s->channels, .cout = last ? s->outs : s->channels, .xs = s->xs,
    };
    if (l->source >= 0) {
        const layer *from = &g->layers[l->source];
        const size_t back = at - (size_t)l->source;
        r.skip = ring_row(g, (size_t)l->source + 1, row + back) + back;
        r.skip_inverse = from->inverse;
        r.skip_zero = from->zero;
    }
    pvr_conv_int8(&r, columns);
}

PVR_OP(nsr_int8) {
    network g = {.strips = pvr_plan_strips(call, team, 1, 1, VL)};
    pvr_strips *s = &g.strips;
    const size_t c = s->channels, n = s->layers;
    const float *w = call->buf[2];
    g.first = w;
    g.widest = c > s->outs ? c : s->outs;
    w += 11 * c;
    for (size_t i = 0; i + 1 < n; i++, w += 2 * c)
        g.layers[i].inverse = w, g.layers[i].zero = w + c;
    for (size_t i = 1; i < n; i++) {
        layer *l = &g.layers[i];
        const size_t outs = i + 1 < n ? c : s->outs;
        l->source = *(const int32_t *)w++;
        l->w = (const int32_t *)w;
        w += outs * 9 * c / 4;
        l->unit = w, l->bias = w + outs, l->slope = w + 2 * outs, l->sums = w + 3 * outs;
        w += 4 * outs;
        l->depth = 3;
    }
    pvr_strip_base(s, w);
    for (size_t i = 1; i < n; i++)
        if (g.layers[i].source >= 0) {
            const size_t from = (size_t)g.layers[i].source;
            layer *kept = &g.layers[from + 1];
            if (kept->depth < i - from + 1) kept->depth = i - from + 1;
        }
    size_t rings = 0;
    for (size_t i = 1; i < n; i++) {
        g.layers[i].ring = rings;
        rings += g.layers[i].depth * c / 4 * s->xs;
    }
    const size_t each = (pvr_strip_floats(s) + c * s->xs + n * g.widest + rings + 64 + 15) / 16 * 16;
    float *all = pvr_scratch(team, (size_t)team->n * each * sizeof *all);
    if (!all) return;
    float *mine = all + (size_t)team->tid * each;
    g.rings = (int32_t *)mine;
    g.row = mine + rings;
    g.biases = g.row + c * s->xs;
    pvr_place_strips(s, g.biases + n * g.widest);
    for (size_t i = 1; i < n; i++) {
        const layer *l = &g.layers[i];
        for (size_t o = 0; o < (i + 1 < n ? c : s->outs); o++)
            g.biases[i * g.widest + o] = l->bias[o] + l->unit[o] * INT8_SHIFT * l->sums[o];
    }
    pvr_stream(s, call, team, layer_row, &g);
}
