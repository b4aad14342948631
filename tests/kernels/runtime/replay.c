/* SPDX-License-Identifier: Apache-2.0 */
/* Runs one slice read from a file and writes its buffers to another: how kernels of other processors run under qemu.
 *
 *     replay           names the instruction set that the library chose
 *     replay IN OUT
 *
 * IN: isa char[16]; u32 threads, buffers, calls, 0; u64 bytes of each buffer; the buffers' bytes; then each call: op
 * char[32], u32 push[32], i32 buffer[8] (-1 none), u64 offset[8]. OUT: the buffers' bytes. Exit codes: 0; 2 a short
 * file; 3 the CPU lacks the isa; 4 unknown operation; 5 pvr_run failed. */
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

static FILE *in;

static void get(void *to, size_t nbytes) {
    if (nbytes && fread(to, 1, nbytes, in) != nbytes)
        exit(2);
}

int main(int argc, char **argv) {
    if (argc == 1)
        return puts(pvr_isa()) < 0;
    if (argc != 3 || !(in = fopen(argv[1], "rb")))
        return 2;
    char isa[16];
    uint32_t head[4];
    get(isa, sizeof isa);
    get(head, sizeof head);
    if (pvr_set_isa(isa))
        return 3;
    uint64_t *sizes = calloc(head[1] + 1, sizeof *sizes);
    unsigned char **buffers = calloc(head[1] + 1, sizeof *buffers);
    pvr_call *calls = calloc(head[2] + 1, sizeof *calls);
    if (!sizes || !buffers || !calls)
        return 2;
    get(sizes, head[1] * sizeof *sizes);
    for (uint32_t i = 0; i < head[1]; i++) {
        buffers[i] = aligned_alloc(64, (sizes[i] + 64) & ~(uint64_t)63);
        if (!buffers[i])
            return 2;
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
    FILE *out = fopen(argv[2], "wb");
    if (!out)
        return 2;
    for (uint32_t i = 0; i < head[1]; i++)
        if (fwrite(buffers[i], 1, sizes[i], out) != sizes[i])
            return 2;
    return fclose(out) ? 2 : 0;
}
