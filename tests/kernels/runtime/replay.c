/* SPDX-License-Identifier: Apache-2.0 */
/* Runs slices that it reads and writes their buffers: how kernels of other processors run under qemu.
 *
 *     replay           names the instruction set that the library chose
 *     replay -         slices from standard input to standard output, one after the other
 *
 * In: isa char[16]; u32 threads, buffers, calls, 0; u64 bytes of each buffer; the buffers' bytes; then each call: op
 * char[32], u32 push[32], i32 buffer[8] (-1 none), u64 offset[8]. Out: the buffers' bytes. Exit codes: 0; 2 a short
 * slice or no memory; 3 the CPU lacks the isa; 4 unknown operation; 5 pvr_run failed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pvr.h"

#if defined(__riscv)
/* Stands before the C library's: qemu's user mode knows riscv_hwprobe only since 8.2, so $HWPROBE says what a kernel
 * would. `v`: the processor has V 1.0; `forbidden`: it has, and this process must not use it; `none`: it has none, or
 * 0.7.1; `unknown`: the kernel has no such call. */
long syscall(long number, ...) {
    enum { PRCTL = 167, HWPROBE = 258, V_GET_CONTROL = 70 };
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    const char *word = getenv("HWPROBE");
    if (word && number == HWPROBE && strcmp(word, "unknown") != 0) {
        struct { int64_t key; uint64_t value; } *pairs = (void *)a[0];
        pairs->value = strcmp(word, "none") == 0 ? 3 : 7; /* F and D, C, V */
        return 0;
    }
    if (word && number == PRCTL && a[0] == V_GET_CONTROL)
        return strcmp(word, "v") == 0 ? 2 : 1; /* on, off */
    if (word && number == HWPROBE) {
        errno = ENOSYS;
        return -1;
    }
    long (*next)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
#endif

typedef struct call_record {
    char op[32];
    uint32_t push[32];
    int32_t buffer[8];
    uint64_t offset[8];
} call_record;

static void get(void *to, size_t nbytes) {
    if (nbytes && fread(to, 1, nbytes, stdin) != nbytes)
        exit(2);
}

static void *made(size_t nbytes) {
    void *memory = aligned_alloc(64, (nbytes + 64) & ~(size_t)63);
    if (!memory)
        exit(2);
    return memory;
}

/* One slice of the instruction set `isa`. */
static int slice(const char *isa) {
    uint32_t head[4];
    get(head, sizeof head);
    if (pvr_set_isa(isa))
        return 3;
    uint64_t *sizes = made(head[1] * sizeof *sizes);
    unsigned char **buffers = made(head[1] * sizeof *buffers);
    pvr_call *calls = made(head[2] * sizeof *calls);
    memset(calls, 0, head[2] * sizeof *calls);
    get(sizes, head[1] * sizeof *sizes);
    for (uint32_t i = 0; i < head[1]; i++) {
        buffers[i] = made(sizes[i]);
        get(buffers[i], sizes[i]);
    }
    for (uint32_t i = 0; i < head[2]; i++) {
        call_record r;
        get(&r, sizeof r);
        int op = pvr_op_index(r.op);
        if (op < 0)
            return 4;
        calls[i].op = (uint32_t)op;
        for (int j = 0; j < 32; j++)
            calls[i].push[j] = r.push[j];
        for (int j = 0; j < 8; j++)
            calls[i].buf[j] = r.buffer[j] < 0 ? NULL : buffers[r.buffer[j]] + r.offset[j];
    }
    if (pvr_run(calls, head[2], (int)head[0]))
        return 5;
    for (uint32_t i = 0; i < head[1]; i++) {
        if (fwrite(buffers[i], 1, sizes[i], stdout) != sizes[i])
            return 2;
        free(buffers[i]);
    }
    free(buffers);
    free(sizes);
    free(calls);
    return fflush(stdout) ? 2 : 0;
}

int main(int argc, char **argv) {
    if (argc == 1)
        return puts(pvr_isa()) < 0;
    if (argc != 2 || strcmp(argv[1], "-") != 0)
        return 2;
    char isa[16];
    while (fread(isa, 1, sizeof isa, stdin) == sizeof isa) {
        int code = slice(isa);
        if (code)
            return code;
    }
    return 0;
}
