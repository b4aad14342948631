# SPDX-License-Identifier: Apache-2.0
"""A VkInstance, and what physical devices say of themselves."""

from __future__ import annotations

from typing import Any

from engine.backends.base import DeviceInfo, Limits
from engine.backends.devices import (
    SUBGROUP_FEATURES,
    Candidate,
    MemoryType,
    NoDevice,
    why_none,
)
from engine.backends.vulkan import features
from engine.backends.vulkan.api.binding import call, vk, why_not
from engine.errors import PvrError

_KINDS = {0: "other", 1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}


class Instance:
    """A VkInstance and what can be asked before a device is opened.

    Raises:
        NoDevice: there is no loader, no driver, or it fails.
    """

    def __init__(self) -> None:
        if vk is None:
            raise NoDevice("no_icd", why_not)
        app = vk.VkApplicationInfo(pApplicationName="pvrd", apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
        info = vk.VkInstanceCreateInfo(pApplicationInfo=app)
        try:
            self.handle = call("vkCreateInstance", vk.vkCreateInstance, info, None)
        except PvrError as e:
            if isinstance(e.__cause__, vk.VkErrorIncompatibleDriver):
                raise why_none([]) from e
            raise NoDevice("failed", str(e)) from e

    def close(self) -> None:
        vk.vkDestroyInstance(self.handle, None)

    def devices(self) -> list[tuple[Any, Candidate]]:
        """Physical devices with what they are."""
        what = "vkEnumeratePhysicalDevices"
        try:
            found = call(what, vk.vkEnumeratePhysicalDevices, self.handle)
        except PvrError:
            return []  # the loader answers "initialization failed" when no driver is installed
        return [(pd, _describe(i, pd, self.handle)) for i, pd in enumerate(found)]


def _describe(index: int, pd: Any, instance: Any) -> Candidate:
    core = vk.vkGetPhysicalDeviceProperties(pd)
    api = (core.apiVersion >> 22 & 0x7F, core.apiVersion >> 12 & 0x3FF)
    lim = core.limits
    properties: dict[str, str | int] = {
        "vendor": f"{core.vendorID:#06x}",
        "device": f"{core.deviceID:#06x}",
        "driver_version": core.driverVersion,
        "api": f"{api[0]}.{api[1]}",
    }
    have: set[str] = set()
    driver, subgroup = "", 1
    if api >= (1, 2):
        v12 = vk.VkPhysicalDeviceVulkan12Properties()
        v11 = vk.VkPhysicalDeviceVulkan11Properties(pNext=v12)
        props = vk.VkPhysicalDeviceProperties2(pNext=v11)
        vk.vkGetPhysicalDeviceProperties2(pd, props)
        driver = f"{_text(v12.driverName)} {_text(v12.driverInfo)}".strip()
        properties |= {
            "uuid": bytes(v11.deviceUUID).hex(),
            "driver_id": v12.driverID,
            "conformant": int(v12.conformanceVersion.major > 0),
            "max_allocation": v11.maxMemoryAllocationSize,
        }
        if v11.subgroupSupportedStages & vk.VK_SHADER_STAGE_COMPUTE_BIT:
            subgroup = v11.subgroupSize
            bits = v11.subgroupSupportedOperations
            have |= {name for i, name in enumerate(SUBGROUP_FEATURES) if bits >> i & 1}
        have |= features.supported(vk, call, instance, pd, subgroup)
    limits = Limits(
        max_workgroup_invocations=lim.maxComputeWorkGroupInvocations,
        max_workgroup_size=_three(lim.maxComputeWorkGroupSize),
        max_workgroup_count=_three(lim.maxComputeWorkGroupCount),
        max_shared_bytes=lim.maxComputeSharedMemorySize,
        max_storage_buffers=min(
            lim.maxPerStageDescriptorStorageBuffers, lim.maxDescriptorSetStorageBuffers
        ),
        max_push_bytes=lim.maxPushConstantsSize,
        max_storage_range=lim.maxStorageBufferRange,
        max_uniform_range=lim.maxUniformBufferRange,
        storage_align=lim.minStorageBufferOffsetAlignment,
        subgroup_size=subgroup,
    )
    kind = _KINDS.get(core.deviceType, "other")
    info = DeviceInfo(
        kind="gpu",
        name=_text(core.deviceName),
        driver=driver or "unknown",
        software=kind == "cpu",
        limits=limits,
        features=frozenset(have),
        properties=properties,
    )
    return Candidate(index, kind, api, compute_family(pd) is not None, info)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else vk.ffi.string(value).decode("utf-8", "replace")


def _three(values: Any) -> tuple[int, int, int]:
    return (values[0], values[1], values[2])


def compute_family(pd: Any) -> int | None:
    """The first queue family that computes."""
    for i, family in enumerate(vk.vkGetPhysicalDeviceQueueFamilyProperties(pd)):
        if family.queueFlags & vk.VK_QUEUE_COMPUTE_BIT and family.queueCount:
            return i
    return None


def memory_types(pd: Any) -> list[MemoryType]:
    """The memory types of a physical device."""
    memory = vk.vkGetPhysicalDeviceMemoryProperties(pd)
    out = []
    for i in range(memory.memoryTypeCount):
        kind = memory.memoryTypes[i]
        out.append(
            MemoryType(
                index=i,
                device_local=bool(kind.propertyFlags & vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT),
                visible=bool(kind.propertyFlags & vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT),
                coherent=bool(kind.propertyFlags & vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT),
                cached=bool(kind.propertyFlags & vk.VK_MEMORY_PROPERTY_HOST_CACHED_BIT),
                heap_bytes=memory.memoryHeaps[kind.heapIndex].size,
            )
        )
    return out
