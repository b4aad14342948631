// SPDX-License-Identifier: Apache-2.0
// Preloaded into pvrd and its workers: a clock that jumps and a disk that is full, without root.
//
// $PVRD_FAULTS_FILE is a mapped file of two int64: nanoseconds that CLOCK_REALTIME is ahead, and
// whether nothing more can be written below $PVRD_FAULTS_FOLDER (ENOSPC; what is there stays).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *words;
static char folder[PATH_MAX];

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("PVRD_FAULTS_FILE"), *below = getenv("PVRD_FAULTS_FOLDER");
    if (!file || !below) return;
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void *at = mmap(NULL, 16, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    snprintf(folder, sizeof folder, "%s/", below);
    if (at != MAP_FAILED) words = at;
}

#define REAL(type, name, ...)                                                   \
    static type (*real)(__VA_ARGS__);                                           \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static int64_t ahead(void) { return words ? words[0] : 0; }

static int below(const char *path) {
    char whole[PATH_MAX];
    if (!words || !words[1] || !path) return 0;
    if (path[0] != '/') {
        if (!getcwd(whole, sizeof whole / 2)) return 0;
        strcat(whole, "/");
        strncat(whole, path, sizeof whole / 2 - 2);
        path = whole;
    }
    return strncmp(path, folder, strlen(folder)) == 0;
}

static int full(int fd) {
    char name[64], path[PATH_MAX];
    if (!words || !words[1]) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

static int refuse(void) {
    errno = ENOSPC;
    return -1;
}

// The clock.

int clock_gettime(clockid_t clock, struct timespec *t) {
    REAL(int, clock_gettime, clockid_t, struct timespec *);
    int r = real(clock, t);
    int64_t by = ahead();
    if (r == 0 && by && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = (int64_t)t->tv_sec * 1000000000 + t->tv_nsec + by;
        t->tv_sec = ns / 1000000000;
        t->tv_nsec = ns % 1000000000;
    }
    return r;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int r = clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return r;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

// The disk.

static int creates(const char *path, int flags) {
    return (flags & O_CREAT) && below(path) && access(path, F_OK) != 0;
}

#define OPEN(name)                                              \
    int name(const char *path, int flags, ...) {                \
        REAL(int, name, const char *, int, ...);                \
        va_list more;                                           \
        va_start(more, flags);                                  \
        mode_t mode = va_arg(more, mode_t);                     \
        va_end(more);                                           \
        return creates(path, flags) ? refuse() : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                            \
    int name(int at, const char *path, int flags, ...) {        \
        REAL(int, name, int, const char *, int, ...);           \
        va_list more;                                           \
        va_start(more, flags);                                  \
        mode_t mode = va_arg(more, mode_t);                     \
        va_end(more);                                           \
        return creates(path, flags) ? refuse() : real(at, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    return below(path) && access(path, F_OK) != 0 ? refuse() : real(path, mode);
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    return full(fd) ? refuse() : real(fd, data, size);
}

#define PWRITE(name, offset_type)                                       \
    ssize_t name(int fd, const void *data, size_t size, offset_type at) {       \
        REAL(ssize_t, name, int, const void *, size_t, offset_type);            \
        return full(fd) ? refuse() : real(fd, data, size, at);          \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t writev(int fd, const struct iovec *pieces, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    return full(fd) ? refuse() : real(fd, pieces, count);
}

#define SIZE(name, offset_type)                                 \
    int name(int fd, offset_type size) {                        \
        REAL(int, name, int, offset_type);                      \
        struct stat now;                                        \
        if (full(fd) && fstat(fd, &now) == 0 && size > now.st_size) return refuse(); \
        return real(fd, size);                                  \
    }
SIZE(ftruncate, off_t)
SIZE(ftruncate64, off64_t)

int posix_fallocate(int fd, off_t at, off_t size) {
    REAL(int, posix_fallocate, int, off_t, off_t);
    return full(fd) ? ENOSPC : real(fd, at, size);
}
