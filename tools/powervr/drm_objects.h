// SPDX-License-Identifier: Apache-2.0
// The handles of drm_stub.c; its caller holds a lock.
#ifndef PVRD_DRM_OBJECTS_H
#define PVRD_DRM_OBJECTS_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>

enum kind { FREE, BO, VM, CONTEXT, FREE_LIST, DATASET, SYNCOBJ };

// One table for all handles: index 1 up. BO: offset and size in the memfd. SYNCOBJ: `value` is the
// timeline's point, a binary one is signalled when it is above 0.
struct object {
    enum kind kind;
    uint64_t offset, size, value;
};

static struct object *objects;
static uint32_t count;

static uint32_t new_object(enum kind kind)
{
    for (uint32_t i = 1; i < count; i++)
        if (objects[i].kind == FREE) {
            objects[i] = (struct object){.kind = kind};
            return i;
        }
    uint32_t handle = count ? count : 1;
    struct object *grown = realloc(objects, (handle + 1) * sizeof *grown);
    if (!grown)
        return 0;
    objects = grown;
    objects[handle] = (struct object){.kind = kind};
    count = handle + 1;
    return handle;
}

static struct object *find(uint32_t handle, enum kind kind)
{
    return handle && handle < count && objects[handle].kind == kind ? &objects[handle] : NULL;
}

// 0 and the handle in *out, or an errno.
static int create(enum kind kind, uint32_t *out)
{
    *out = new_object(kind);
    return *out ? 0 : ENOMEM;
}

static int destroy(enum kind kind, uint32_t handle)
{
    struct object *o = find(handle, kind);
    if (!o)
        return EINVAL;
    o->kind = FREE;
    return 0;
}

#endif
