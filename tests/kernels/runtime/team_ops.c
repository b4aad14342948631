/* SPDX-License-Identifier: Apache-2.0 */
/* Operations that try the team: compiled by test_kernels_team.py with the runtime. */
#include <stdatomic.h>
#include <string.h>

#include "pvr.h"

/* Each thread counts up in turn-free rounds; after each barrier all must see all of the round before.
 * buf[1]: u32[n] one count a thread; buf[2]: u32 errors; push 0: rounds. */
PVR_OP(rounds) {
    atomic_uint *counts = call->buf[1], *errors = call->buf[2];
    for (uint32_t round = 1; round <= call->push[0]; round++) {
        atomic_store_explicit(&counts[team->tid], round, memory_order_relaxed);
        pvr_barrier(team);
        for (int i = 0; i < team->n; i++)
            if (atomic_load_explicit(&counts[i], memory_order_relaxed) != round)
                atomic_fetch_add(errors, 1);
        pvr_barrier(team);
    }
}

/* All threads fill their parts of the scratch and then read their neighbour's. push 0: bytes a thread. */
PVR_OP(scratch) {
    atomic_uint *errors = call->buf[2];
    size_t part = call->push[0];
    unsigned char *s = pvr_scratch(team, part * (size_t)team->n);
    if (!s || (uintptr_t)s % 64) {
        atomic_fetch_add(errors, 1);
        return;
    }
    memset(s + part * (size_t)team->tid, team->tid + 1, part);
    pvr_barrier(team);
    int other = (team->tid + 1) % team->n;
    for (size_t i = 0; i < part; i++)
        if (s[part * (size_t)other + i] != other + 1)
            atomic_fetch_add(errors, 1);
}

/* Asks for what no machine has. */
PVR_OP(greedy) {
    if (pvr_scratch(team, (size_t)-4096))
        atomic_fetch_add((atomic_uint *)call->buf[2], 1);
}

/* Counts that it was run, and says how large the team is. */
PVR_OP(count) {
    if (team->tid == 0) {
        ((uint32_t *)call->buf[1])[0] += 1;
        ((uint32_t *)call->buf[1])[1] = (uint32_t)team->n;
    }
}
