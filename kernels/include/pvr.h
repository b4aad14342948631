/* SPDX-License-Identifier: Apache-2.0 */
/* The C side of the kernel contract: one call structure, one team of threads, one function an operation.
 *
 * A slice is an array of pvr_call. All threads of the team run every call together; the runner puts a
 * barrier after each. An operation splits its work by team->tid and team->n and never starts threads.
 */
#ifndef PVR_H
#define PVR_H

#include <stddef.h>
#include <stdint.h>

#define PVR_MAX_BINDINGS 8
#define PVR_MAX_PUSH_WORDS 32

/* Weight formats; the layout of each is in docs/architecture.md, "Weights". */
enum pvr_format { PVR_F16 = 0, PVR_Q8 = 1, PVR_Q4 = 2, PVR_F32 = 3 };

/* Words of the parameter buffer (binding 0), 16 u32 in all. */
enum pvr_param { PVR_N_TOKENS = 0, PVR_POS0 = 1, PVR_LAST_ROW = 2 };

typedef struct pvr_call {
    uint32_t op;                       /* index from pvr_op_index() */
    uint32_t reserved;
    uint32_t push[PVR_MAX_PUSH_WORDS]; /* the push constants of the GLSL kernel, bit for bit */
    void *buf[PVR_MAX_BINDINGS];       /* the bindings of the GLSL kernel, offsets applied; [0] = parameters */
} pvr_call;

typedef struct pvr_team pvr_team;
struct pvr_team {
    int tid, n;      /* this thread, threads in the team */
    void *shared;    /* the runner's own state */
};

typedef void (*pvr_op_fn)(const pvr_call *call, pvr_team *team);

/* All threads meet. Every thread of the team has to call it the same number of times. */
void pvr_barrier(pvr_team *team);
/* The team's common scratch memory, at least `bytes`, 64-byte aligned, not zeroed, valid until the call ends; a
 * second use within one call gives the same memory, moved if it has to grow. Collective: every thread calls it
 * with the same size and gets the same address. NULL when there is no memory: the operation returns at once and
 * pvr_run answers PVR_NO_MEMORY. */
void *pvr_scratch(pvr_team *team, size_t bytes);

/* The half-open range of 0..n-1 that thread tid of the team does. */
static inline void pvr_split(const pvr_team *t, size_t n, size_t *begin, size_t *end) {
    *begin = n * (size_t)t->tid / (size_t)t->n;
    *end = n * ((size_t)t->tid + 1) / (size_t)t->n;
}

static inline float pvr_push_f32(const pvr_call *c, int i) {
    union { uint32_t u; float f; } v = {c->push[i]};
    return v.f;
}

/* Each op.c is compiled once for each instruction set; PVR_OP(matvec) names the function for this one. */
#define PVR_CAT_(a, b) a##_##b
#define PVR_CAT(a, b) PVR_CAT_(a, b)
#ifndef PVR_ISA
#define PVR_ISA base
#endif
#define PVR_OP(name) void PVR_CAT(pvr_op_##name, PVR_ISA)(const pvr_call *call, pvr_team *team)

/* RISC-V's V 1.0, by a compiler that makes its instructions of GCC's vectors: clang 17 and later. GCC 14 takes them apart. */
#if defined(__clang__) && defined(__riscv_v_intrinsic) && __riscv_v_intrinsic >= 12000
#define PVR_RVV 1
#endif

/* What Python calls (ctypes releases the GIL around each). Process-wide; threads may run slices side by side.
 * Never fork a process that has run a slice without exec: OpenMP's threads do not survive it. */
#if defined(__GNUC__)
#define PVR_API __attribute__((visibility("default")))
#else
#define PVR_API
#endif
enum pvr_status { PVR_OK = 0, PVR_NO_OP = -1, PVR_NO_MEMORY = -2 };
#define PVR_MAX_THREADS 256

PVR_API int pvr_op_index(const char *name);  /* -1 when there is no such operation */
PVR_API const char *pvr_isa(void);           /* the instruction set in use; the best at load, PVRD_ISA lowers it */
PVR_API const char *pvr_isa_at(int i);       /* the i-th that this CPU has, the plainest first; NULL past the end */
PVR_API int pvr_set_isa(const char *name);   /* for tests and benchmarks; -1 when the CPU lacks it */
/* Runs n calls in order with a team of `threads` (0: one for each CPU that this process may use). A pvr_status. */
PVR_API int pvr_run(const pvr_call *calls, uint32_t n, int threads);
/* Samples of `bytes` (1, 2), rows so many bytes apart: of every `sparse`th of every `sparse`th row of low [height, width] the
 * difference of the first sample of high [scale height, scale width] there from a bilinear estimate; for each tile, whose
 * first columns are `firsts` times sparse, the sums of it, of its size and of the steps to the four neighbours: sums [3, tiles]. */
PVR_API void pvr_held(const char *low, int64_t low_row, const char *high, int64_t high_row, int bytes, uint32_t height,
                      uint32_t width, uint32_t scale, uint32_t sparse, const int64_t *firsts, uint32_t tiles, double *sums);

#endif
