/* SPDX-License-Identifier: Apache-2.0 */
/* One parallel region a slice: all threads run each call, and meet at a barrier of our own after it.
 *
 * libgomp's barrier either spins for milliseconds or sleeps at once, for the whole process. Between two kernel
 * calls of some microseconds the threads should spin shortly, but a CPU may be taken by another process at any
 * moment: so spin, then sleep on a futex. Never yield: Linux (6.18) takes the rest of its slice from a thread that
 * does, each time, and on a busy machine the team would wait for seconds. */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime.h"

enum { SPINS = 400 };

/* Scratch memory behind a header of one cache line, so that a pointer says all about it. */
typedef struct arena {
    _Alignas(64) size_t size;
    _Alignas(64) char data[];
} arena;

typedef struct shared {
    _Alignas(64) atomic_uint arrived;
    _Alignas(64) atomic_uint generation;
    atomic_uint sleepers;
    _Alignas(64) int spins; /* 0 when the team has more threads than CPUs: spinning would keep the last one out */
    atomic_int status;
    arena *scratch;
} shared;

/* The scratch of the last slice, kept for the next one; two slices at once make the second allocate its own. */
static _Atomic(arena *) kept;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#else
    __asm__ volatile("" ::: "memory");
#endif
}

static void futex(atomic_uint *word, int what, unsigned value) {
    syscall(SYS_futex, word, what | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

void pvr_barrier(pvr_team *team) {
    if (team->n == 1)
        return;
    shared *s = team->shared;
    unsigned mine = atomic_load_explicit(&s->generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&s->arrived, 1, memory_order_acq_rel) + 1 == (unsigned)team->n) {
        atomic_store_explicit(&s->arrived, 0, memory_order_relaxed);
        atomic_store(&s->generation, mine + 1); /* seq_cst with `sleepers`: a sleeper sees the one or we the other */
        if (atomic_load(&s->sleepers))
            futex(&s->generation, FUTEX_WAKE, INT_MAX);
        return;
    }
    for (int i = 0; i < s->spins; i++) {
        if (atomic_load_explicit(&s->generation, memory_order_acquire) != mine)
            return;
        relax();
    }
    atomic_fetch_add(&s->sleepers, 1);
    while (atomic_load(&s->generation) == mine)
        futex(&s->generation, FUTEX_WAIT, mine);
    atomic_fetch_sub(&s->sleepers, 1);
}

void *pvr_scratch(pvr_team *team, size_t bytes) {
    shared *s = team->shared;
    /* The arena changes only between the two barriers below, so all threads take the same way here. */
    if (!s->scratch || s->scratch->size < bytes) {
        pvr_barrier(team);
        if (team->tid == 0) {
            size_t size = (bytes + bytes / 4 + 4095) & ~(size_t)4095;
            arena *grown = size > bytes ? aligned_alloc(64, sizeof(arena) + size) : NULL;
            if (grown) {
                grown->size = size;
                free(s->scratch);
                s->scratch = grown;
            } else {
                atomic_store(&s->status, PVR_NO_MEMORY);
            }
        }
        pvr_barrier(team);
    }
    return s->scratch && s->scratch->size >= bytes ? s->scratch->data : NULL;
}

static int usable_cpus(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN); /* more CPUs than cpu_set_t has room for */
    return n > 0 ? (int)n : 1;
}

int pvr_run(const pvr_call *calls, uint32_t n, int threads) {
    const pvr_op_fn *ops = pvr_ops();
    for (uint32_t i = 0; i < n; i++)
        if (calls[i].op >= pvr_n_ops)
            return PVR_NO_OP;
    int cpus = usable_cpus();
    if (threads <= 0)
        threads = cpus;
    if (threads > PVR_MAX_THREADS)
        threads = PVR_MAX_THREADS;
    shared s;
    memset(&s, 0, sizeof s);
    s.spins = threads > cpus ? 0 : SPINS;
    s.scratch = atomic_exchange(&kept, NULL);
#pragma omp parallel num_threads(threads)
    {
        pvr_team team = {omp_get_thread_num(), omp_get_num_threads(), &s};
        for (uint32_t i = 0; i < n; i++) {
            ops[calls[i].op](&calls[i], &team);
            pvr_barrier(&team);
            if (atomic_load_explicit(&s.status, memory_order_relaxed) != PVR_OK)
                break;
        }
    }
    free(atomic_exchange(&kept, s.scratch));
    return atomic_load(&s.status);
}
