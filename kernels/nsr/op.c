/* SPDX-License-Identifier: Apache-2.0 */
/* A thread streams a strip of columns downwards: of each layer's input the three last rows are
 * kept, [row][channel][x], so that they stay in its caches. */
#include "conv.h"

/* Columns of a strip: its rows stay in the second cache, and what strips have in common is little. */
enum { STRIP = 256, NARROW = 128, MOST_LAYERS = 32 };

typedef struct {
    int bits, scale;
    size_t stride, out_stride, channels, layers, outs, xs;
    const float *w[MOST_LAYERS]; /* of each layer */
    float base[25 * 16];         /* [outs][25] */
    float *luma, *rings, *maps;  /* layers + 3 rows; three rows of each later layer's input; a row */
} network;

/* Strides of what a thread keeps, in floats. */
static size_t ring_floats(const network *g) { return 3 * g->channels * g->xs; }
static size_t thread_floats(const network *g) {
    return (g->layers + 3) * g->xs + (g->layers - 1) * ring_floats(g) + g->outs * g->xs + 64;
}

static float *ring_row(const network *g, size_t layer, size_t row) {
    return g->rings + (layer - 1) * ring_floats(g) + row % 3 * g->channels * g->xs;
}

static float *luma_row(const network *g, size_t row) {
    return g->luma + row % (g->layers + 3) * g->xs;
}

/* Row `row` of a layer's output, counted from the first that the strip depends on. */
static void run_layer(const network *g, size_t layer, size_t row, size_t columns) {
    const size_t n = g->layers;
    pvr_conv_row r = {
        .w = g->w[layer],
        .y = layer + 1 == n ? g->maps : ring_row(g, layer + 1, row),
        .cin = layer ? g->channels : 1,
        .cout = layer + 1 == n ? g->outs : g->channels,
        .xs = g->xs,
    };
    for (size_t a = 0; a < 3; a++)
        r.x[a] = layer ? ring_row(g, layer, row + a) : luma_row(g, row + a);
    pvr_conv(&r, columns);
}

/* Core rows y0..y1-1 of the band, columns x0..x0+cols-1 of the frame. */
static void run_strip(const network *g, const pvr_call *call, size_t y0, size_t y1, size_t x0,
                      size_t cols) {
    const uint32_t *p = call->buf[0];
    const size_t n = g->layers, window = cols + 2 * n;
    const float unit = 1.0f / (g->bits == 8 ? 255.0f : 65535.0f);
    for (size_t row = 0; row < y1 - y0 + 2 * n; row++) {
        const int above = (int)(p[PVR_BAND_Y] + y0 + row) - (int)n;
        const int y = pvr_clamp(above, (int)p[PVR_HEIGHT] - 1) - (int)p[PVR_SRC_Y];
        const uint32_t *line = (const uint32_t *)call->buf[1] + (size_t)y * g->stride;
        pvr_samples(g->bits, line, (int)p[PVR_WIDTH] - 1, (int)x0 - (int)n, (int)window, unit,
                    luma_row(g, row));
        for (size_t layer = 0; layer < n && row >= 2 * (layer + 1); layer++)
            run_layer(g, layer, row - 2 * (layer + 1), window - 2 * (layer + 1));
        if (row < 2 * n) continue;
        const size_t core = row - 2 * n;
        pvr_pixels out = {
            .base = g->base, .maps = g->maps, .xs = g->xs,
            .across = g->scale == 2 ? 2 : 4,
        };
        for (size_t t = 0; t < 5; t++) out.x[t] = luma_row(g, core + n - 2 + t) + n - 2;
        uint32_t *dst = (uint32_t *)call->buf[3] + (size_t)g->scale * (y0 + core) * g->out_stride;
        pvr_enlarge(&out, g->bits, g->scale, 1, 0, dst, g->out_stride, x0, cols);
    }
}

PVR_OP(nsr) {
    const uint32_t *p = call->buf[0], *k = call->push;
    const size_t tw = k[3], th = k[4];
    network g = {
        .bits = (int)k[0], .scale = (int)k[7], .stride = k[1], .out_stride = k[2],
        .channels = k[5], .layers = k[6],
    };
    const size_t c = g.channels, n = g.layers, groups = g.scale == 2 ? 1 : (size_t)g.scale;
    g.outs = 4 * groups;
    const float *w = call->buf[2];
    for (size_t i = 0; i < n; i++) {
        const size_t cin = i ? c : 1, cout = i + 1 < n ? c : g.outs;
        g.w[i] = w;
        w += (cin * 9 + 2) * cout;
    }
    for (size_t group = 0; group < groups; group++)
        for (size_t t = 0; t < 25; t++)
            for (size_t q = 0; q < 4; q++)
                g.base[(4 * group + q) * 25 + t] = w[(group * 25 + t) * 4 + q];
    /* A unit of work is a strip, or a part of its height where threads would have none. */
    const size_t team_size = (size_t)team->n, tiles = p[PVR_N_TILES];
    size_t strips = (tw + STRIP - 1) / STRIP;
    const size_t most = (tw + NARROW - 1) / NARROW;
    if (tiles * strips < team_size) strips = most < team_size ? most : team_size;
    const size_t parts = (team_size + tiles * strips - 1) / (tiles * strips);
    const size_t strip = (tw + strips - 1) / strips;
    g.xs = (strip + 2 * n + VL - 1) / VL * VL + 2 * VL;
    float *mine = pvr_scratch(team, (size_t)team->n * thread_floats(&g) * sizeof *mine);
    if (!mine) return;
    g.luma = mine + (size_t)team->tid * thread_floats(&g);
    g.rings = g.luma + (n + 3) * g.xs;
    g.maps = g.rings + (n - 1) * ring_floats(&g);

    const size_t rows = p[PVR_HEIGHT] - p[PVR_BAND_Y] < th ? p[PVR_HEIGHT] - p[PVR_BAND_Y] : th;
    size_t begin, end;
    pvr_split(team, tiles * strips * parts, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const size_t tile = i / (strips * parts), x = i / parts % strips * strip, part = i % parts;
        const size_t left = (p[PVR_COL0] + tile) * tw + x;
        if (x >= tw || left >= p[PVR_WIDTH]) continue;
        const size_t room = p[PVR_WIDTH] - left, wide = tw - x < strip ? tw - x : strip;
        run_strip(&g, call, rows * part / parts, rows * (part + 1) / parts, left,
                  room < wide ? room : wide);
    }
}
