// SPDX-License-Identifier: Apache-2.0
// What the GPU of drm_stub.c is: its cores, heaps and areas, and the answers to DEV_QUERY.
#ifndef PVRD_DRM_DEVICE_H
#define PVRD_DRM_DEVICE_H

#include <errno.h>
#include <stdint.h>
#include <string.h>

#include <drm/pvr_drm.h>

// A core as the kernel driver describes it: branch, version, number of scalable units and
// configuration, and its registers in dwords. The kernel computes the last four from the feature
// list in the firmware: partition = tile 16 * 16 * partitions * output registers of a pixel;
// alloc = common store - 1024 - partition, at most 11264 on cores with BRN 44079;
// coeffs = alloc - 1024 * (tiles in flight + 1); local = coeffs, at most 4096.
struct core {
    const char *name;
    uint16_t b, v, n, c;
    uint32_t alloc, partition, coeffs, local;
};

static const struct core cores[] = {
    {"axe-1-16m", 33, 15, 11, 3, 6144, 1024, 4096, 4096},
    {"bxm-4-64", 36, 52, 104, 182, 11264, 6144, 4096, 4096},
    {"bxs-4-64", 36, 53, 104, 796, 11264, 8192, 4096, 4096},
};

// Enhancements that user space has to know and that all cores above have; of the quirks that it has
// to know they have none.
static const uint32_t enhancements[] = {35421};

#define GIB (1ull << 30)
// The address space as the hardware divides it; the region header heap is for old cores only.
static const struct drm_pvr_heap heaps[DRM_PVR_HEAP_COUNT] = {
    [DRM_PVR_HEAP_GENERAL] = {.base = 512 * GIB, .size = 128 * GIB, .page_size_log2 = 12},
    [DRM_PVR_HEAP_PDS_CODE_DATA] = {.base = 872 * GIB, .size = 4 * GIB, .page_size_log2 = 12},
    [DRM_PVR_HEAP_USC_CODE] = {.base = 896 * GIB, .size = 4 * GIB, .page_size_log2 = 12},
    [DRM_PVR_HEAP_RGNHDR] = {.base = 0, .size = 0, .page_size_log2 = 12},
    [DRM_PVR_HEAP_VIS_TEST] = {.base = 968 * GIB, .size = 2 << 20, .page_size_log2 = 12},
    [DRM_PVR_HEAP_TRANSFER_FRAG] = {.base = 912 * GIB, .size = 16 * GIB, .page_size_log2 = 12},
};

#define AREA(usage, heap, at, bytes) \
    {.area_usage = DRM_PVR_STATIC_DATA_AREA_##usage, .location_heap_id = DRM_PVR_HEAP_##heap, \
     .offset = (at), .size = (bytes)}
static const struct drm_pvr_static_data_area areas[] = {
    AREA(FENCE, GENERAL, 0, 128),          AREA(YUV_CSC, GENERAL, 128, 1024),
    AREA(VDM_SYNC, PDS_CODE_DATA, 0, 128), AREA(EOT, PDS_CODE_DATA, 128, 128),
    AREA(VDM_SYNC, USC_CODE, 0, 128),
};

static const struct core *core; // the one that was named

// ---------------------------------------------------------------- DEV_QUERY

static int copy_out(struct drm_pvr_ioctl_dev_query_args *a, const void *data, uint32_t bytes)
{
    if (a->pointer)
        memcpy((void *)(uintptr_t)a->pointer, data, a->size < bytes ? a->size : bytes);
    a->size = bytes;
    return 0;
}

// Fills an array of the caller's, whose stride may be smaller or larger than ours.
static void copy_array(struct drm_pvr_obj_array *to, const void *from, uint32_t n, uint32_t bytes)
{
    if (to->array) {
        if (to->count > n)
            to->count = n;
        for (uint32_t i = 0; i < to->count; i++) {
            char *at = (char *)(uintptr_t)to->array + (size_t)i * to->stride;
            memset(at, 0, to->stride);
            memcpy(at, (const char *)from + (size_t)i * bytes,
                   to->stride < bytes ? to->stride : bytes);
        }
    } else {
        to->count = n;
        to->stride = bytes;
    }
}

static int dev_query(struct drm_pvr_ioctl_dev_query_args *a)
{
    void *p = (void *)(uintptr_t)a->pointer;
    switch (a->type) {
    case DRM_PVR_DEV_QUERY_GPU_INFO_GET: {
        struct drm_pvr_dev_query_gpu_info info = {
            .gpu_id = (uint64_t)core->b << 48 | (uint64_t)core->v << 32 | core->n << 16 | core->c,
            .num_phantoms = 1,
        };
        return copy_out(a, &info, sizeof info);
    }
    case DRM_PVR_DEV_QUERY_RUNTIME_INFO_GET: {
        struct drm_pvr_dev_query_runtime_info info = {
            .free_list_min_pages = 25,
            .free_list_max_pages = 262144,
            .common_store_alloc_region_size = core->alloc,
            .common_store_partition_space_size = core->partition,
            .max_coeffs = core->coeffs,
            .cdm_max_local_mem_size_regs = core->local,
        };
        return copy_out(a, &info, sizeof info);
    }
    case DRM_PVR_DEV_QUERY_QUIRKS_GET: {
        struct drm_pvr_dev_query_quirks q = {0};
        if (p)
            q.quirks = ((struct drm_pvr_dev_query_quirks *)p)->quirks;
        return copy_out(a, &q, sizeof q);
    }
    case DRM_PVR_DEV_QUERY_ENHANCEMENTS_GET: {
        struct drm_pvr_dev_query_enhancements q = {.count = 1};
        if (p)
            q.enhancements = ((struct drm_pvr_dev_query_enhancements *)p)->enhancements;
        if (q.enhancements)
            memcpy((void *)(uintptr_t)q.enhancements, enhancements, sizeof enhancements);
        return copy_out(a, &q, sizeof q);
    }
    case DRM_PVR_DEV_QUERY_HEAP_INFO_GET:
        if (p)
            copy_array(&((struct drm_pvr_dev_query_heap_info *)p)->heaps, heaps,
                       DRM_PVR_HEAP_COUNT, sizeof heaps[0]);
        a->size = sizeof(struct drm_pvr_dev_query_heap_info);
        return 0;
    case DRM_PVR_DEV_QUERY_STATIC_DATA_AREAS_GET:
        if (p)
            copy_array(&((struct drm_pvr_dev_query_static_data_areas *)p)->static_data_areas, areas,
                       sizeof areas / sizeof areas[0], sizeof areas[0]);
        a->size = sizeof(struct drm_pvr_dev_query_static_data_areas);
        return 0;
    }
    return EINVAL;
}

#endif
