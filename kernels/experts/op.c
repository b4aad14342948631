/* SPDX-License-Identifier: Apache-2.0 */
/* The pairs of a token and an expert are put in order by expert. Experts are taken one after the
 * other, each with all of its tokens, up to WEIGHTS_TOKENS at a time as matmul takes them: its tiles
 * of 16 rows, shared out over the team, come from memory once, and what they are multiplied with
 * stays in the cache. */
#include <string.h>

#include "weights.h"

/* Pairs of one expert that are multiplied at once: `n` from `first` on in the order. `width` is what
 * the kernel takes, at least n; `quants` is where their rounded activations lie. */
typedef struct group {
    uint32_t expert, first, n, width;
    size_t quants;
} group;

typedef struct work {
    uint32_t *order;  /* [pairs] numbers of pairs, by expert */
    uint32_t *starts; /* [count + 1] of an expert's in it */
    group *groups;    /* [pairs] */
    uint32_t *n;      /* of groups; whether any has more than one pair */
    uint8_t *rows;    /* each row of x rounded by itself */
    uint8_t *sets;    /* those of groups of more than one, as weights_tile_ wants them */
} work;

static size_t align64(size_t n) { return (n + 63) & ~(size_t)63; }

static void plan(work *w, const uint32_t *route, size_t pairs, uint32_t first, size_t count,
                 size_t each) {
    memset(w->starts, 0, (count + 1) * sizeof *w->starts);
    for (size_t p = 0; p < pairs; p++)
        if (route[2 * p] - first < count)
            w->starts[route[2 * p] - first + 1]++;
    for (size_t e = 0; e < count; e++)
        w->starts[e + 1] += w->starts[e];
    for (size_t p = 0; p < pairs; p++)
        if (route[2 * p] - first < count)
            w->order[w->starts[route[2 * p] - first]++] = (uint32_t)p;
    uint32_t made = 0, at = 0; /* starts[e] is now where e ends */
    size_t quants = 0;
    for (size_t e = 0; e < count; e++)
        while (at < w->starts[e]) {
            const uint32_t left = w->starts[e] - at;
            const uint32_t n = left < WEIGHTS_TOKENS ? left : WEIGHTS_TOKENS;
            uint32_t width = 1;
            while (width < n)
                width *= 2;
            w->groups[made++] = (group){(uint32_t)e, at, n, width, quants};
            quants += width > 1 ? width * each : 0;
            at += n;
        }
    w->n[0] = made;
    w->n[1] = quants > 0;
}

/* The rounded activations of a group side by side. */
static void gather(const work *w, const group *g, size_t blocks, size_t each, uint32_t per) {
    for (size_t b = 0; b < blocks; b++) {
        uint8_t *to = w->sets + g->quants + b * g->width * 44;
        uint32_t *words = (uint32_t *)(to + g->width * WEIGHTS_BLOCK);
        for (uint32_t j = 0; j < g->width; j++) {
            const uint32_t pair = w->order[g->first + (j < g->n ? j : g->n - 1)];
            const uint8_t *from = w->rows + pair / per * each + b * 44;
            memcpy(to + j * WEIGHTS_BLOCK, from, WEIGHTS_BLOCK);
            memcpy(words + j, from + WEIGHTS_BLOCK, 4);
            memcpy(words + g->width + j, from + WEIGHTS_BLOCK + 4, 4);
            memcpy(words + 2 * g->width + j, from + WEIGHTS_BLOCK + 8, 4);
        }
    }
}

/* `width` is a constant where this is called. */
PVR_INLINE void multiply(const pvr_call *call, const work *w, const group *g, const uint32_t *at,
                         size_t tile, const size_t width) {
    const uint32_t fmt = call->push[0];
    const size_t k = call->push[2], used = call->push[5], ldy = call->push[8],
                 blocks = k / WEIGHTS_BLOCK, each = weights_quants_nbytes(k, 1);
    const int add = call->push[6] != 0;
    const uint32_t *route = call->buf[3];
    const float *x = call->buf[2], *row[WEIGHTS_TOKENS];
    float *y = (float *)call->buf[4] + call->push[7];
    uint32_t pair[WEIGHTS_TOKENS];
    vf share[WEIGHTS_TOKENS], sums[WEIGHTS_TOKENS];
    for (size_t j = 0; j < width; j++) { /* past the last: the last once more, not stored */
        float of;
        pair[j] = w->order[g->first + (j < g->n ? j : g->n - 1)];
        memcpy(&of, route + 2 * pair[j] + 1, 4);
        share[j] = vf_set1(of);
        row[j] = x + (add ? pair[j] : pair[j] / used) * k;
    }
    const uint8_t *quants =
        width > 1 ? w->sets + g->quants : w->rows + (add ? pair[0] : pair[0] / used) * each;
    if (fmt == PVR_Q4)
        weights_tile_q4(at, blocks, quants, width, sums);
    else if (fmt == PVR_Q8)
        weights_tile_q8(at, blocks, quants, width, sums);
    else
        weights_tile_f16(at, k, row, width, (uintptr_t)at + WEIGHTS_AHEAD, WEIGHTS_K, sums);
    for (size_t j = 0; j < width && j < g->n; j++) {
        float *to = y + (add ? pair[j] / used : pair[j]) * ldy + tile * LANES;
        weights_store(to, add ? vf_mul(sums[j], share[j]) : sums[j], LANES, (uint32_t)add);
    }
}

/* A function for each, as in matmul. */
#define MULTIPLY(WIDTH)                                                                       \
    static __attribute__((noinline)) void multiply_##WIDTH(                                   \
        const pvr_call *call, const work *w, const group *g, const uint32_t *at, size_t tile) { \
        multiply(call, w, g, at, tile, WIDTH);                                                \
    }
MULTIPLY(1)
MULTIPLY(2)
MULTIPLY(4)
MULTIPLY(WEIGHTS_TOKENS)

PVR_OP(experts) {
    const uint32_t fmt = call->push[0], first = call->push[3];
    const size_t n = call->push[1], k = call->push[2], count = call->push[4],
                 used = call->push[5], blocks = k / WEIGHTS_BLOCK;
    const int add = call->push[6] != 0;
    const size_t pairs = ((const uint32_t *)call->buf[0])[PVR_N_TOKENS] * used;
    const size_t rows = add ? pairs : pairs / used; /* of x */
    const size_t each = fmt == PVR_F16 ? 0 : weights_quants_nbytes(k, 1);
    const size_t lists = align64(pairs * 4) + align64((count + 3) * 4),
                 groups = align64(pairs * sizeof(group)), rounded = align64(rows * each);
    /* A group of more than one pair is less than twice as wide as it has pairs. */
    uint8_t *scratch = pvr_scratch(team, lists + groups + rounded + 2 * pairs * each);
    if (!scratch)
        return;
    work w;
    w.order = (uint32_t *)scratch;
    w.n = (uint32_t *)(scratch + align64(pairs * 4));
    w.starts = w.n + 2;
    w.groups = (group *)(scratch + lists);
    w.rows = scratch + lists + groups;
    w.sets = w.rows + rounded;

    size_t begin, end;
    if (team->tid == 0)
        plan(&w, call->buf[3], pairs, first, count, each);
    if (each) {
        pvr_split(team, rows * blocks, &begin, &end);
        for (size_t i = begin; i < end; i++)
            weights_quantise((const float *)call->buf[2] + i * WEIGHTS_BLOCK, w.rows + i * 44, 0,
                             1);
    }
    pvr_barrier(team);
    if (each && w.n[1]) {
        pvr_split(team, w.n[0], &begin, &end);
        for (size_t i = begin; i < end; i++)
            if (w.groups[i].width > 1)
                gather(&w, w.groups + i, blocks, each, add ? 1 : (uint32_t)used);
        pvr_barrier(team);
    }

    const size_t tiles = n / LANES, tile_words = blocks * weights_block_words(fmt);
    pvr_split(team, tiles, &begin, &end);
    for (uint32_t i = 0, next; i < w.n[0]; i = next) {
        const uint32_t expert = w.groups[i].expert;
        for (next = i + 1; next < w.n[0] && w.groups[next].expert == expert;)
            next++;
        const uint32_t *at =
            (const uint32_t *)call->buf[1] + (expert * tiles + begin) * tile_words;
        for (size_t tile = begin; tile < end; tile++, at += tile_words)
            for (const group *g = w.groups + i; g < w.groups + next; g++)
                switch (g->width) {
                case 1: multiply_1(call, &w, g, at, tile); break;
                case 2: multiply_2(call, &w, g, at, tile); break;
                case 4: multiply_4(call, &w, g, at, tile); break;
                default: multiply_WEIGHTS_TOKENS(call, &w, g, at, tile); break;
                }
    }
}
