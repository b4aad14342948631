/* SPDX-License-Identifier: Apache-2.0 */
/* Which instruction set the operations use: the best that this CPU has, unless PVRD_ISA or pvr_set_isa() lowers it. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__riscv)
#include <sys/syscall.h>
#include <unistd.h>
#endif

static _Atomic(const pvr_isa_table *) current;

#if defined(__riscv)
/* V 1.0, by the kernel's own word. /proc/cpuinfo and AT_HWCAP say `v` of the incompatible 0.7.1, too; a kernel that does
 * not know these calls (riscv_hwprobe came with 6.4, its word for V with 6.5) may be of either kind. */
static int riscv_has_v(void) {
    enum { HWPROBE = 258, KEY_IMA_EXT_0 = 4, IMA_V = 1 << 2 };
    enum { V_GET_CONTROL = 70, CURRENT = 3, ON = 2 };
    struct { int64_t key; uint64_t value; } pair = {KEY_IMA_EXT_0, 0};
    if (syscall(HWPROBE, &pair, 1L, 0L, NULL, 0L) != 0 || pair.key != KEY_IMA_EXT_0 || !(pair.value & IMA_V))
        return 0;
    /* The processor has it; may this process use it? An administrator can forbid it by default. */
    const long control = syscall(SYS_prctl, V_GET_CONTROL, 0L, 0L, 0L, 0L);
    return control > 0 && (control & CURRENT) == ON;
}
#endif

static int cpu_has(const char *isa) {
    if (strcmp(isa, "base") == 0)
        return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (strcmp(isa, "avx2") == 0)
        return avx2;
    if (strcmp(isa, "avx512") == 0)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
    if (strcmp(isa, "dotprod") == 0)
        return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__riscv)
    if (strcmp(isa, "rvv") == 0)
        return riscv_has_v();
#endif
    return 0;
}

static const pvr_isa_table *find(const char *name) {
    for (const pvr_isa_table *t = pvr_isas; t->name; t++)
        if (strcmp(t->name, name) == 0 && cpu_has(name))
            return t;
    return NULL;
}

__attribute__((constructor)) static void choose(void) {
    const pvr_isa_table *best = pvr_isas;
    for (const pvr_isa_table *t = pvr_isas; t->name; t++)
        if (cpu_has(t->name))
            best = t;
    const char *wanted = getenv("PVRD_ISA");
    const pvr_isa_table *lower = wanted ? find(wanted) : NULL;
    atomic_store(&current, lower ? lower : best);
}

const pvr_op_fn *pvr_ops(void) { return atomic_load(&current)->ops; }

const char *pvr_isa(void) { return atomic_load(&current)->name; }

const char *pvr_isa_at(int i) {
    for (const pvr_isa_table *t = pvr_isas; t->name; t++)
        if (cpu_has(t->name) && i-- == 0)
            return t->name;
    return NULL;
}

int pvr_set_isa(const char *name) {
    const pvr_isa_table *t = find(name);
    if (!t)
        return -1;
    atomic_store(&current, t);
    return 0;
}

int pvr_op_index(const char *name) {
    for (uint32_t i = 0; i < pvr_n_ops; i++)
        if (strcmp(pvr_op_names[i], name) == 0)
            return (int)i;
    return -1;
}
