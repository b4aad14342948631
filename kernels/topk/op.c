/* SPDX-License-Identifier: Apache-2.0 */
/* Stage 0: blocks are shared out over the team; the 64th key of a block is found by bisection over
 * its bits (counting vectorises), then whatever lies above, and of the equals the first, is put in
 * order by counting. Stage 1: one thread merges the lists with a heap of their heads. */
#include <math.h>

#include "lanes.h"

enum { TOP = 64, BLOCK = 1024, RECORD = 2 * TOP + 2 };
#define NONE 0xffffffffu
#define LEAST 0xff800000u /* -inf */

typedef struct entry {
    uint32_t key, id;
} entry;

/* Unsigned keys in the order of the floats: 0 nothing, 1 NaN, then -inf to +inf with one zero. */
PVR_INLINE uint32_t key_of(uint32_t bits) {
    uint32_t positive = bits == 0x80000000u ? 0 : bits;
    uint32_t key = positive ^ ((uint32_t)((int32_t)positive >> 31) | 0x80000000u);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 1 : key;
}

PVR_INLINE float value_of(uint32_t key) { return pvr_float(key >> 31 ? key & 0x7fffffffu : ~key); }

static inline int before(entry a, entry b) {
    return a.key > b.key || (a.key == b.key && a.id < b.id);
}

/* The sum of exp(x - top) over the numbers of a block. */
static float sum_of(const uint32_t *keys, uint32_t most, float top) {
    if (!isfinite(top)) { /* then those that equal it are all that counts */
        size_t count = 0;
        for (size_t i = 0; i < BLOCK; i++)
            count += most > 1 && keys[i] == most;
        return (float)count;
    }
    vf sum = vf_set1(0);
    float values[BLOCK];
    for (size_t i = 0; i < BLOCK; i++)
        values[i] = keys[i] > 1 ? value_of(keys[i]) : -3e38f;
    for (size_t i = 0; i < BLOCK; i += LANES)
        sum = vf_add(sum, vf_exp(vf_sub(vf_load(values + i), vf_set1(top))));
    return vf_sum(sum);
}

static void blockwise(const uint32_t *logits, uint32_t first, size_t n, uint32_t *record) {
    uint32_t keys[BLOCK], some[BLOCK], ids[BLOCK], greatest[TOP];
    for (size_t i = 0; i < n; i++)
        keys[i] = key_of(logits[first + i]);
    for (size_t i = n; i < BLOCK; i++)
        keys[i] = 0;

    /* Of TOP groups each has a greatest key; what is less than all of these is not among the TOP. */
    for (size_t i = 0; i < TOP; i++)
        greatest[i] = keys[i];
    for (size_t i = TOP; i < BLOCK; i += TOP)
        for (size_t j = 0; j < TOP; j++)
            greatest[j] = keys[i + j] > greatest[j] ? keys[i + j] : greatest[j];
    uint32_t least = greatest[0], most = greatest[0];
    for (size_t i = 0; i < TOP; i++) {
        least = greatest[i] < least ? greatest[i] : least;
        most = greatest[i] > most ? greatest[i] : most;
    }
    size_t n_some = 0;
    for (uint32_t i = 0; i < BLOCK; i++) {
        some[n_some] = keys[i];
        ids[n_some] = i;
        n_some += keys[i] >= least;
    }

    uint32_t limit = 0; /* the greatest key that at least TOP keys reach */
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        uint32_t count = 0;
        for (size_t i = 0; i < n_some; i++)
            count += some[i] >= (limit | bit);
        if (count >= TOP)
            limit |= bit;
    }
    uint32_t chosen_keys[TOP], chosen_ids[TOP];
    size_t n_chosen = 0;
    for (size_t i = 0; i < n_some; i++)
        if (some[i] > limit) {
            chosen_keys[n_chosen] = some[i];
            chosen_ids[n_chosen++] = ids[i];
        }
    for (size_t i = 0; n_chosen < TOP; i++)
        if (some[i] == limit) {
            chosen_keys[n_chosen] = limit;
            chosen_ids[n_chosen++] = ids[i];
        }
    /* The place of each is the number of those before it; among equals the ids rise already. */
    for (size_t i = 0; i < TOP; i++) {
        uint32_t rank = 0;
        for (size_t j = 0; j < TOP; j++)
            rank += chosen_keys[j] > chosen_keys[i];
        for (size_t j = 0; j < i; j++)
            rank += chosen_keys[j] == chosen_keys[i];
        const uint32_t id = first + chosen_ids[i];
        record[2 * rank] = chosen_keys[i] ? id : NONE;
        record[2 * rank + 1] = chosen_keys[i] ? logits[id] : LEAST;
    }

    const float top = most > 1 ? value_of(most) : pvr_float(LEAST);
    record[2 * TOP] = pvr_bits(top);
    record[2 * TOP + 1] = pvr_bits(sum_of(keys, most, top));
}

/* Lets entry i of a heap of list heads sink to its place. */
static void sink(entry *heap, uint32_t *list, size_t n, size_t i) {
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= n)
            return;
        if (child + 1 < n && before(heap[child + 1], heap[child]))
            child++;
        if (before(heap[i], heap[child]))
            return;
        entry e = heap[i];
        uint32_t l = list[i];
        heap[i] = heap[child];
        list[i] = list[child];
        heap[child] = e;
        list[child] = l;
        i = child;
    }
}

static void merge(const uint32_t *part, size_t blocks, uint32_t *out, void *scratch) {
    entry *heap = scratch;
    uint32_t *list = (uint32_t *)(heap + blocks), *head = list + blocks;
    float top = pvr_float(LEAST), sum = 0;
    for (size_t b = 0; b < blocks; b++) {
        float most = pvr_float(part[b * RECORD + 2 * TOP]);
        top = most > top ? most : top;
    }
    for (size_t b = 0; b < blocks; b++) {
        float most = pvr_float(part[b * RECORD + 2 * TOP]);
        sum += pvr_float(part[b * RECORD + 2 * TOP + 1]) * (most == top ? 1.0f : expf(most - top));
    }
    out[2 * TOP] = pvr_bits(top);
    out[2 * TOP + 1] = pvr_bits(sum > 0 ? top + logf(sum) : top);

    for (size_t b = 0; b < blocks; b++) {
        const uint32_t *record = part + b * RECORD;
        heap[b] = (entry){record[0] == NONE ? 0 : key_of(record[1]), record[0]};
        list[b] = (uint32_t)b;
        head[b] = 0;
    }
    for (size_t i = blocks / 2; i-- > 0;)
        sink(heap, list, blocks, i);
    for (size_t i = 0; i < TOP; i++) {
        const uint32_t from = list[0];
        const uint32_t *record = part + from * RECORD + 2 * head[from];
        out[2 * i] = heap[0].id;
        out[2 * i + 1] = heap[0].id == NONE ? LEAST : record[1];
        if (heap[0].id == NONE)
            continue; /* all that is left is nothing */
        head[from]++;
        record += 2;
        if (head[from] < TOP && record[0] != NONE)
            heap[0] = (entry){key_of(record[1]), record[0]};
        else
            heap[0] = (entry){0, NONE};
        sink(heap, list, blocks, 0);
    }
}

PVR_OP(topk) {
    const size_t v = call->push[0], blocks = (v + BLOCK - 1) / BLOCK;
    if (call->push[1] == 0) {
        size_t begin, end;
        pvr_split(team, blocks, &begin, &end);
        for (size_t b = begin; b < end; b++) {
            size_t n = v - b * BLOCK < BLOCK ? v - b * BLOCK : BLOCK;
            blockwise(call->buf[1], (uint32_t)(b * BLOCK), n,
                      (uint32_t *)call->buf[2] + b * RECORD);
        }
        return;
    }
    void *scratch = pvr_scratch(team, blocks * 16);
    if (scratch && team->tid == 0)
        merge(call->buf[2], blocks, call->buf[3], scratch);
}
