/* SPDX-License-Identifier: Apache-2.0 */
/* A network of 3x3 convolutions as a stream of rows (the push constants and bindings of kernels/nsr):
 * a thread takes a strip of columns downwards; each row of luma makes a row of each layer, as soon
 * as the layer has three rows of input. What is kept of them lies in the thread's caches. */
#ifndef PVR_STRIP_H
#define PVR_STRIP_H

#include "video.h"

/* Columns of a strip: its rows stay in the second cache, and what strips have in common is little. */
enum { STRIP_WIDE = 256, STRIP_NARROW = 128, STRIP_MOST_LAYERS = 40 };

typedef struct pvr_strips pvr_strips;
/* Fills a row of input, [inputs][xs], with n columns from x0 on of frame row y (both may lie outside). */
typedef void (*pvr_fill_fn)(const pvr_strips *s, const pvr_call *call, int y, int x0, int n, float *to);

struct pvr_strips {
    int bits, scale;
    size_t inputs;                  /* channels; the first one is what the filters see */
    pvr_fill_fn fill;
    size_t plane, target, across;   /* word of the plane's width; buffer of the result; as pvr_pixels' */
    int by, component;              /* samples of `by` components lie by turns */
    size_t stride, out_stride, tw, th, channels, layers;
    size_t outs;                    /* of the last layer: groups of four maps */
    size_t step, rows;              /* columns and rows that a layer gives at a time: 1 and 1, or 4 and 2 (Winograd) */
    size_t xs;                      /* of a row of values: the window, and room for whole vectors */
    size_t strip, strips, parts;    /* columns; strips of a tile; parts of its height */
    float base[25 * 16];            /* [outs][25] */
    float *luma, *maps;             /* layers + 2 + rows rows; `rows` times outs rows: what the last layer writes */
};

/* Makes `rows` rows of a layer from row `row` on, counted from the first that the strip depends on. */
typedef void (*pvr_layer_fn)(const void *network, size_t layer, size_t row, size_t columns);

/* Columns that a layer gives for `cols` of the last. */
static inline size_t pvr_strip_columns(const pvr_strips *s, size_t layer, size_t cols) {
    for (size_t i = s->layers; --i > layer;) cols = (cols + s->step - 1) / s->step * s->step + 2;
    return cols;
}
/* Columns of input that they take. */
static inline size_t pvr_strip_window(const pvr_strips *s, size_t cols) {
    return (pvr_strip_columns(s, 0, cols) + s->step - 1) / s->step * s->step + 2;
}

static inline void pvr_fill_luma(const pvr_strips *s, const pvr_call *call, int y, int x0, int n,
                                 float *to) {
    const uint32_t *p = call->buf[0];
    const float unit = 1.0f / (s->bits == 8 ? 255.0f : 65535.0f);
    y = pvr_clamp(y, (int)p[PVR_HEIGHT] - 1) - (int)p[PVR_SRC_Y];
    const uint32_t *line = (const uint32_t *)call->buf[1] + (size_t)y * s->stride;
    pvr_samples(s->bits, line, (int)p[PVR_WIDTH] - 1, x0, n, unit, to);
}

/* A luma network's; others change it. group: columns that a layer writes together. */
static inline pvr_strips pvr_plan_strips(const pvr_call *call, const pvr_team *team, size_t step, size_t rows,
                                         size_t group) {
    const uint32_t *k = call->push;
    pvr_strips s = {
        .step = step, .rows = rows, .inputs = 1, .fill = pvr_fill_luma, .plane = PVR_WIDTH, .target = 3, .by = 1,
        .bits = (int)k[0], .stride = k[1], .out_stride = k[2], .tw = k[3], .th = k[4],
        .channels = k[5], .layers = k[6], .scale = (int)k[7],
    };
    s.outs = s.scale == 2 ? 4 : 4 * (size_t)s.scale;
    s.across = s.scale == 2 ? 2 : 4;
    /* A unit of work is a strip, or a part of its height. A thread takes whole ones, so what counts is how much the
     * one takes that has the most of them, with what units have in common. */
    const size_t n = (size_t)team->n, tiles = ((const uint32_t *)call->buf[0])[PVR_N_TILES];
    const size_t most = (s.tw + STRIP_NARROW - 1) / STRIP_NARROW, halo = 2 * s.layers;
    size_t least = SIZE_MAX;
    for (size_t strips = (s.tw + STRIP_WIDE - 1) / STRIP_WIDE; strips <= most; strips++)
        for (size_t parts = 1; parts <= n; parts++) {
            const size_t columns = (s.tw + strips - 1) / strips + halo, height = (s.th + parts - 1) / parts + halo;
            const size_t takes = (tiles * strips * parts + n - 1) / n * columns * height;
            if (takes >= least) continue;
            least = takes, s.strips = strips, s.parts = parts;
        }
    /* Strips begin at whole steps of the frame, as tiles do. */
    s.strip = ((s.tw + s.strips - 1) / s.strips + step - 1) / step * step;
    s.xs = (pvr_strip_window(&s, s.strip) + group - 1) / group * group + 2 * VL;
    return s;
}

/* Floats of luma and maps together, and how they are set. */
static inline size_t pvr_strip_floats(const pvr_strips *s) {
    return ((s->layers + 2 + s->rows) * s->inputs + s->rows * s->outs) * s->xs;
}
static inline void pvr_place_strips(pvr_strips *s, float *at) {
    s->luma = at;
    s->maps = at + (s->layers + 2 + s->rows) * s->inputs * s->xs;
}

/* filters: [groups][25][4]. */
static inline void pvr_strip_base(pvr_strips *s, const float *filters) {
    for (size_t o = 0; o < s->outs; o++)
        for (size_t t = 0; t < 25; t++) s->base[o * 25 + t] = filters[(o / 4 * 25 + t) * 4 + o % 4];
}

static inline float *pvr_luma_row(const pvr_strips *s, size_t row) {
    return s->luma + row % (s->layers + 2 + s->rows) * s->inputs * s->xs;
}

/* Core rows y0..y1-1 of the band, `cols` columns of the frame from x0 on. Layers give rows in groups that count
 * from the frame's own first row, so that a value's sum is the same in every cut; what they give of rows before
 * y0 or behind y1-1 is left. */
static inline void pvr_run_strip(const pvr_strips *s, const pvr_call *call, pvr_layer_fn layer_row,
                                 const void *network, size_t y0, size_t y1, size_t x0,
                                 size_t cols) {
    const uint32_t *p = call->buf[0];
    const size_t n = s->layers, window = pvr_strip_window(s, cols);
    const size_t top = p[s->plane + 2] + y0, early = top % s->rows, high = early + y1 - y0;
    size_t columns[STRIP_MOST_LAYERS];
    for (size_t i = 0; i < n; i++) columns[i] = pvr_strip_columns(s, i, cols);
    for (size_t row = 0; row < high + 2 * n; row += s->rows) {
        for (size_t i = row; i < row + s->rows; i++) {
            /* Rows that nothing kept depends on may not be there: the next one that is stands for them. */
            const size_t held = i < early ? early : i < high + 2 * n ? i : high + 2 * n - 1;
            s->fill(s, call, (int)(top - early + held) - (int)n, (int)x0 - (int)n, (int)window,
                    pvr_luma_row(s, i));
        }
        for (size_t layer = 0; layer < n && row >= 2 * (layer + 1); layer++)
            layer_row(network, layer, row - 2 * (layer + 1), columns[layer]);
        for (size_t i = 0; i < s->rows; i++) {
            const size_t core = row + i - 2 * n;
            if (row < 2 * n || core < early || core >= high) continue;
            pvr_pixels out = {
                .base = s->base, .maps = s->maps + i * s->outs * s->xs, .xs = s->xs, .across = s->across,
            };
            for (size_t t = 0; t < 5; t++) out.x[t] = pvr_luma_row(s, core + n - 2 + t) + n - 2;
            uint32_t *dst = (uint32_t *)call->buf[s->target];
            dst += (size_t)s->scale * (y0 + core - early) * s->out_stride;
            pvr_enlarge(&out, s->bits, s->scale, s->by, s->component, dst, s->out_stride, x0, cols);
        }
    }
}

/* All tiles of the slice, with the rest of the team. */
static inline void pvr_stream(const pvr_strips *s, const pvr_call *call, const pvr_team *team,
                              pvr_layer_fn layer_row, const void *network) {
    const uint32_t *p = call->buf[0];
    const size_t left_rows = p[s->plane + 1] - p[s->plane + 2];
    const size_t rows = left_rows < s->th ? left_rows : s->th;
    size_t begin, end;
    pvr_split(team, p[PVR_N_TILES] * s->strips * s->parts, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t part = i % s->parts, x = i / s->parts % s->strips * s->strip;
        const size_t left = (p[PVR_COL0] + i / (s->strips * s->parts)) * s->tw + x;
        if (x >= s->tw || left >= p[s->plane]) continue;
        const size_t room = p[s->plane] - left;
        const size_t wide = s->tw - x < s->strip ? s->tw - x : s->strip;
        const size_t y0 = rows * part / s->parts, y1 = rows * (part + 1) / s->parts;
        pvr_run_strip(s, call, layer_row, network, y0, y1, left, room < wide ? room : wide);
    }
}

#endif
