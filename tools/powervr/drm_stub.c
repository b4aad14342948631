// SPDX-License-Identifier: Apache-2.0
// Answers the DRM calls of Mesa's powervr driver on a machine that has no such GPU (LD_PRELOAD).
//
// The names and structures are those of the kernel's public headers drm.h and pvr_drm.h. The render
// node is a memfd: buffer objects are pieces of it, so that mmap of the "device" at the offset that
// GET_BO_MMAP_OFFSET gave just works, and no call but the ones below has to be replaced. Jobs do
// nothing and signal what they were told to signal. PVRD_POWERVR_CORE names the core; with
// PVRD_POWERVR_TRACE=1 each call is printed. What libdrm reads below /sys and /dev/dri lies in the
// folder that qemu puts before those (see sysroot.py).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <drm/drm.h>
#include <drm/pvr_drm.h>

#include "drm_device.h"
#include "drm_objects.h"

#define NODE "/dev/dri/renderD128"
#define PAGE 4096u

// ---------------------------------------------------------------- state

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t used;
static int store = -1;
static struct stat64 store_stat;
static int trace;

static int (*real_open)(const char *, int, ...);
static int (*real_ioctl)(int, unsigned long, ...);
static int (*real_fstat)(int, struct stat64 *);
static int (*real_stat)(const char *, struct stat64 *);

__attribute__((constructor)) static void begin(void)
{
    real_open = dlsym(RTLD_NEXT, "open64");
    real_ioctl = dlsym(RTLD_NEXT, "ioctl");
    real_fstat = dlsym(RTLD_NEXT, "fstat64");
    real_stat = dlsym(RTLD_NEXT, "stat64");
    trace = getenv("PVRD_POWERVR_TRACE") != NULL;
    const char *name = getenv("PVRD_POWERVR_CORE");
    for (size_t i = 0; name && i < sizeof cores / sizeof cores[0]; i++)
        if (!strcmp(name, cores[i].name))
            core = &cores[i];
    if (!core) {
        fprintf(stderr, "drm_stub: PVRD_POWERVR_CORE=%s is no core known here\n", name ? name : "");
        _exit(2);
    }
    store = memfd_create("renderD128", MFD_CLOEXEC);
    if (store < 0 || real_fstat(store, &store_stat)) {
        perror("drm_stub: memfd_create");
        _exit(2);
    }
}

// ---------------------------------------------------------------- pvr_drm.h

static int create_bo(struct drm_pvr_ioctl_create_bo_args *a)
{
    if (!a->size || a->size % PAGE || a->flags & ~DRM_PVR_BO_FLAGS_MASK)
        return EINVAL;
    if (ftruncate(store, (off_t)(used + a->size)))
        return ENOMEM;
    int error = create(BO, &a->handle);
    if (!error) {
        objects[a->handle].offset = used;
        objects[a->handle].size = a->size;
        used += a->size;
    }
    return error;
}

static int vm_map(const struct drm_pvr_ioctl_vm_map_args *a)
{
    struct object *bo = find(a->handle, BO);
    if (!bo || !find(a->vm_context_handle, VM))
        return ENOENT;
    if (!a->device_addr || a->device_addr % PAGE || a->size % PAGE
        || a->offset + a->size > bo->size)
        return EINVAL;
    for (int i = 0; i < DRM_PVR_HEAP_COUNT; i++)
        if (a->device_addr >= heaps[i].base
            && a->device_addr + a->size <= heaps[i].base + heaps[i].size)
            return 0;
    return EINVAL;
}

static int signal_point(uint32_t handle, uint64_t point)
{
    struct object *o = find(handle, SYNCOBJ);
    if (!o)
        return ENOENT;
    if (!point)
        point = o->value ? o->value : 1; // binary
    if (point > o->value)
        o->value = point;
    return 0;
}

// Nothing is computed: a job is over when it is submitted.
static int submit_jobs(const struct drm_pvr_ioctl_submit_jobs_args *a)
{
    for (uint32_t i = 0; i < a->jobs.count; i++) {
        const struct drm_pvr_job *job =
            (const void *)(uintptr_t)(a->jobs.array + (uint64_t)i * a->jobs.stride);
        if (!find(job->context_handle, CONTEXT))
            return EINVAL;
        for (uint32_t k = 0; k < job->sync_ops.count; k++) {
            const struct drm_pvr_sync_op *op =
                (const void *)(uintptr_t)(job->sync_ops.array + (uint64_t)k * job->sync_ops.stride);
            if (!(op->flags & DRM_PVR_SYNC_OP_FLAG_SIGNAL))
                continue;
            int error = signal_point(op->handle, op->value);
            if (error)
                return error;
        }
    }
    return 0;
}

// ---------------------------------------------------------------- drm.h

static void copy_name(char *to, __kernel_size_t *room, const char *from)
{
    size_t n = strlen(from);
    if (to && *room)
        memcpy(to, from, n < *room ? n : *room);
    *room = n;
}

static int get_cap(struct drm_get_cap *a)
{
    switch (a->capability) {
    case DRM_CAP_SYNCOBJ:
    case DRM_CAP_SYNCOBJ_TIMELINE:
        a->value = 1;
        return 0;
    case DRM_CAP_PRIME:
        a->value = DRM_PRIME_CAP_IMPORT | DRM_PRIME_CAP_EXPORT;
        return 0;
    }
    a->value = 0;
    return 0;
}

// Nothing runs beside the caller, so what is not signalled now will not be.
static int wait_for(const uint32_t *handles, const uint64_t *points, uint32_t n, uint32_t flags,
                    uint32_t *first)
{
    uint32_t done = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct object *o = find(handles[i], SYNCOBJ);
        if (!o)
            return ENOENT;
        uint64_t point = points && points[i] ? points[i] : 1;
        if (o->value >= point && !done++)
            *first = i;
    }
    return done == n || (done && !(flags & DRM_SYNCOBJ_WAIT_FLAGS_WAIT_ALL)) ? 0 : ETIME;
}

static int set_all(const struct drm_syncobj_array *a, uint64_t value)
{
    const uint32_t *handles = (const void *)(uintptr_t)a->handles;
    for (uint32_t i = 0; i < a->count_handles; i++) {
        struct object *o = find(handles[i], SYNCOBJ);
        if (!o)
            return ENOENT;
        o->value = value;
    }
    return 0;
}

static int timeline(const struct drm_syncobj_timeline_array *a, int query)
{
    const uint32_t *handles = (const void *)(uintptr_t)a->handles;
    uint64_t *points = (void *)(uintptr_t)a->points;
    for (uint32_t i = 0; i < a->count_handles; i++) {
        struct object *o = find(handles[i], SYNCOBJ);
        if (!o)
            return ENOENT;
        if (query)
            points[i] = o->value;
        else if (signal_point(handles[i], points[i]))
            return ENOENT;
    }
    return 0;
}

static int call(unsigned long request, void *p)
{
    switch (request) {
    case DRM_IOCTL_VERSION: {
        struct drm_version *a = p;
        a->version_major = 1;
        a->version_minor = a->version_patchlevel = 0;
        copy_name(a->name, &a->name_len, "powervr");
        copy_name(a->date, &a->date_len, "20230904");
        copy_name(a->desc, &a->desc_len, "Imagination PowerVR (Series 6 and later) & IMG Graphics");
        return 0;
    }
    case DRM_IOCTL_GET_CAP:
        return get_cap(p);
    case DRM_IOCTL_GEM_CLOSE: {
        struct object *o = find(((struct drm_gem_close *)p)->handle, BO);
        if (o)
            fallocate(store, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)o->offset,
                      (off_t)o->size);
        return destroy(BO, ((struct drm_gem_close *)p)->handle);
    }
    case DRM_IOCTL_PVR_DEV_QUERY:
        return dev_query(p);
    case DRM_IOCTL_PVR_CREATE_BO:
        return create_bo(p);
    case DRM_IOCTL_PVR_GET_BO_MMAP_OFFSET: {
        struct drm_pvr_ioctl_get_bo_mmap_offset_args *a = p;
        struct object *bo = find(a->handle, BO);
        if (bo)
            a->offset = bo->offset;
        return bo ? 0 : ENOENT;
    }
    case DRM_IOCTL_PVR_CREATE_VM_CONTEXT:
        return create(VM, &((struct drm_pvr_ioctl_create_vm_context_args *)p)->handle);
    case DRM_IOCTL_PVR_DESTROY_VM_CONTEXT:
        return destroy(VM, ((struct drm_pvr_ioctl_destroy_vm_context_args *)p)->handle);
    case DRM_IOCTL_PVR_VM_MAP:
        return vm_map(p);
    case DRM_IOCTL_PVR_VM_UNMAP:
        return find(((struct drm_pvr_ioctl_vm_unmap_args *)p)->vm_context_handle, VM) ? 0 : EINVAL;
    case DRM_IOCTL_PVR_CREATE_CONTEXT:
        return create(CONTEXT, &((struct drm_pvr_ioctl_create_context_args *)p)->handle);
    case DRM_IOCTL_PVR_DESTROY_CONTEXT:
        return destroy(CONTEXT, ((struct drm_pvr_ioctl_destroy_context_args *)p)->handle);
    case DRM_IOCTL_PVR_CREATE_FREE_LIST:
        return create(FREE_LIST, &((struct drm_pvr_ioctl_create_free_list_args *)p)->handle);
    case DRM_IOCTL_PVR_DESTROY_FREE_LIST:
        return destroy(FREE_LIST, ((struct drm_pvr_ioctl_destroy_free_list_args *)p)->handle);
    case DRM_IOCTL_PVR_CREATE_HWRT_DATASET:
        return create(DATASET, &((struct drm_pvr_ioctl_create_hwrt_dataset_args *)p)->handle);
    case DRM_IOCTL_PVR_DESTROY_HWRT_DATASET:
        return destroy(DATASET, ((struct drm_pvr_ioctl_destroy_hwrt_dataset_args *)p)->handle);
    case DRM_IOCTL_PVR_SUBMIT_JOBS:
        return submit_jobs(p);
    case DRM_IOCTL_SYNCOBJ_CREATE: {
        struct drm_syncobj_create *a = p;
        int error = create(SYNCOBJ, &a->handle);
        if (!error && a->flags & DRM_SYNCOBJ_CREATE_SIGNALED)
            objects[a->handle].value = 1;
        return error;
    }
    case DRM_IOCTL_SYNCOBJ_DESTROY:
        return destroy(SYNCOBJ, ((struct drm_syncobj_destroy *)p)->handle);
    case DRM_IOCTL_SYNCOBJ_WAIT: {
        struct drm_syncobj_wait *a = p;
        return wait_for((void *)(uintptr_t)a->handles, NULL, a->count_handles, a->flags,
                        &a->first_signaled);
    }
    case DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT: {
        struct drm_syncobj_timeline_wait *a = p;
        return wait_for((void *)(uintptr_t)a->handles, (void *)(uintptr_t)a->points,
                        a->count_handles, a->flags, &a->first_signaled);
    }
    case DRM_IOCTL_SYNCOBJ_RESET:
        return set_all(p, 0);
    case DRM_IOCTL_SYNCOBJ_SIGNAL:
        return set_all(p, 1);
    case DRM_IOCTL_SYNCOBJ_TIMELINE_SIGNAL:
        return timeline(p, 0);
    case DRM_IOCTL_SYNCOBJ_QUERY:
        return timeline(p, 1);
    case DRM_IOCTL_SYNCOBJ_TRANSFER: {
        const struct drm_syncobj_transfer *a = p;
        const struct object *from = find(a->src_handle, SYNCOBJ);
        return !from ? ENOENT : from->value ? signal_point(a->dst_handle, a->dst_point) : EINVAL;
    }
    case DRM_IOCTL_SYNCOBJ_HANDLE_TO_FD: {
        struct drm_syncobj_handle *a = p;
        a->fd = find(a->handle, SYNCOBJ) ? eventfd(1, EFD_CLOEXEC) : -1;
        return a->fd < 0 ? ENOENT : 0;
    }
    case DRM_IOCTL_SYNCOBJ_FD_TO_HANDLE: { // all that was exported is over
        struct drm_syncobj_handle *a = p;
        int error = a->handle ? 0 : create(SYNCOBJ, &a->handle);
        return error ? error : signal_point(a->handle, 0);
    }
    }
    fprintf(stderr, "drm_stub: ioctl 0x%lx (number 0x%lx) is not answered here\n", request,
            request & 0xff);
    return EINVAL;
}

// ---------------------------------------------------------------- the C library, replaced

int ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    // An int in some callers, so the upper half may be filled with its sign.
    request &= 0xffffffffu;
    if ((request >> 8 & 0xff) != DRM_IOCTL_BASE)
        return real_ioctl(fd, request, argument);
    pthread_mutex_lock(&lock);
    int error = call(request, argument);
    pthread_mutex_unlock(&lock);
    if (trace)
        fprintf(stderr, "drm_stub: 0x%02lx: %s\n", request & 0xff, error ? strerror(error) : "ok");
    errno = error;
    return error ? -1 : 0;
}

// libdrm and Mesa are built for large files, so these names are the ones that they call.
int open64(const char *path, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    int makes = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE;
    mode_t mode = makes ? va_arg(list, mode_t) : 0;
    va_end(list);
    return strcmp(path, NODE) ? real_open(path, flags, mode) : fcntl(store, F_DUPFD_CLOEXEC, 3);
}

int fstat64(int fd, struct stat64 *s)
{
    int result = real_fstat(fd, s);
    if (!result && s->st_dev == store_stat.st_dev && s->st_ino == store_stat.st_ino) {
        s->st_mode = S_IFCHR | 0666;
        s->st_rdev = makedev(226, 128);
    }
    return result;
}

int stat64(const char *path, struct stat64 *s)
{
    return strcmp(path, NODE) ? real_stat(path, s) : fstat64(store, s);
}
