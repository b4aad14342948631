# SPDX-License-Identifier: Apache-2.0
"""Which features a device has, in our names, and the structs that turn them on when it is opened.

Nothing is on by itself: a device is opened with just the features that lowering may count on, and
the counters of those who measure it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import PvrError

# The driver's words and ours (DeviceInfo.features), by the struct that has them.
CORE = {"shaderInt16": "int16", "shaderInt64": "int64", "shaderFloat64": "fp64"}
VULKAN_11 = {"storageBuffer16BitAccess": "storage16"}
VULKAN_12 = {
    "shaderFloat16": "fp16",
    "shaderInt8": "int8",
    "storageBuffer8BitAccess": "storage8",
    "vulkanMemoryModel": "memory_model",
    "vulkanMemoryModelDeviceScope": "device_scope",
    "bufferDeviceAddress": "buffer_address",
}
INT_DOT = {"shaderIntegerDotProduct": "int_dot"}
# Matrices of 16 x 16 x 16 that a subgroup of 32 multiplies, halves into floats: what kernels use.
COOPMAT = {"cooperativeMatrix": "coopmat"}
COOPMAT_SIZE, COOPMAT_SUBGROUP = 16, 32
COUNTERS = {"performanceCounterQueryPools": "counters"}

INT_DOT_EXTENSION = "VK_KHR_shader_integer_dot_product"
COOPMAT_EXTENSION = "VK_KHR_cooperative_matrix"
COUNTERS_EXTENSION = "VK_KHR_performance_query"
# How a queue stands among those of other processes; either name will do.
PRIORITY_EXTENSIONS = ("VK_KHR_global_priority", "VK_EXT_global_priority")
# Extensions that need no struct to turn them on.
PLAIN = {
    "host_memory": ("VK_EXT_external_memory_host",),
    "dma_buf": ("VK_KHR_external_memory_fd", "VK_EXT_external_memory_dma_buf"),
}


@dataclass(frozen=True)
class Features:
    """`names` are ours. `head` begins the chain of structs that turns just these on, `extensions`
    go with it; `keep` holds what the chain points to.
    """

    names: frozenset[str]
    extensions: tuple[str, ...]
    head: Any
    keep: tuple[Any, ...]


def supported(
    vk: Any, call: Callable[..., Any], instance: Any, pd: Any, subgroup: int
) -> frozenset[str]:
    """The features that a physical device with subgroups of that size has. `vk` and `call` are
    api's.
    """
    names = query(vk, call, pd).names
    if "coopmat" in names and not _multiplies(vk, call, instance, pd, subgroup):
        names -= {"coopmat"}
    return names


def priority_extension(vk: Any, call: Callable[..., Any], pd: Any) -> str:
    """The extension by which queues get a global priority, "" where there is none."""
    there = _extensions(vk, call, pd)
    return next((name for name in PRIORITY_EXTENSIONS if name in there), "")


def _extensions(vk: Any, call: Callable[..., Any], pd: Any) -> set[str]:
    what = "vkEnumerateDeviceExtensionProperties"
    return {e.extensionName for e in call(what, vk.vkEnumerateDeviceExtensionProperties, pd, None)}


def query(
    vk: Any, call: Callable[..., Any], pd: Any, allowed: Collection[str] | None = None
) -> Features:
    """What the driver says of itself, of those that are `allowed` if given."""
    there = _extensions(vk, call, pd)
    # Struct by struct: its maker, its names, and the extension that brings it ("" the core).
    known: list[tuple[Any, dict[str, str], str]] = [
        (vk.VkPhysicalDeviceVulkan11Features, VULKAN_11, ""),
        (vk.VkPhysicalDeviceVulkan12Features, VULKAN_12, ""),
        (vk.VkPhysicalDeviceShaderIntegerDotProductFeatures, INT_DOT, INT_DOT_EXTENSION),
        (vk.VkPhysicalDeviceCooperativeMatrixFeaturesKHR, COOPMAT, COOPMAT_EXTENSION),
        (vk.VkPhysicalDevicePerformanceQueryFeaturesKHR, COUNTERS, COUNTERS_EXTENSION),
    ]
    known = [entry for entry in known if not entry[2] or entry[2] in there]
    asked: list[Any] = []
    for make, _, _ in known:
        asked.append(make(pNext=asked[-1]) if asked else make())
    core = vk.VkPhysicalDeviceFeatures2(pNext=asked[-1])
    vk.vkGetPhysicalDeviceFeatures2(pd, core)

    def wanted(name: str) -> bool:
        return allowed is None or name in allowed

    def on(struct: Any, names: dict[str, str]) -> dict[str, int]:
        return {f: 1 for f, name in names.items() if getattr(struct, f) and wanted(name)}

    have = {name for name, e in PLAIN.items() if there.issuperset(e) and wanted(name)}
    extensions = [extension for name in sorted(have) for extension in PLAIN[name]]
    chain: list[Any] = []
    for struct, (make, names, extension) in zip(asked, known, strict=True):
        fields = on(struct, names)
        if fields:
            chain.append(make(pNext=chain[-1], **fields) if chain else make(**fields))
            have |= {names[field] for field in fields}
            extensions += [extension] if extension else []
    fields = on(core.features, CORE)
    have |= {CORE[field] for field in fields}
    plain = vk.VkPhysicalDeviceFeatures(**fields)
    head = vk.VkPhysicalDeviceFeatures2(pNext=chain[-1] if chain else None, features=plain)
    return Features(frozenset(have), tuple(extensions), head, (*chain, plain))


def _multiplies(vk: Any, call: Callable[..., Any], instance: Any, pd: Any, subgroup: int) -> bool:
    """Do compute shaders multiply matrices of the size that kernels use? The extension has to be
    there.
    """
    name = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
    properties = vk.VkPhysicalDeviceCooperativeMatrixPropertiesKHR()
    vk.vkGetPhysicalDeviceProperties2(pd, vk.VkPhysicalDeviceProperties2(pNext=properties))
    if not properties.cooperativeMatrixSupportedStages & vk.VK_SHADER_STAGE_COMPUTE_BIT:
        return False
    try:
        shapes = call(name, vk.vkGetInstanceProcAddr(instance, name), pd)
    except (vk.ProcedureNotFoundError, vk.ExtensionNotSupportedError, PvrError):
        return False
    return subgroup == COOPMAT_SUBGROUP and any(_fits(vk, shape) for shape in shapes)


def _fits(vk: Any, shape: Any) -> bool:
    half, single = vk.VK_COMPONENT_TYPE_FLOAT16_KHR, vk.VK_COMPONENT_TYPE_FLOAT32_KHR
    sizes: Sequence[int] = (shape.MSize, shape.NSize, shape.KSize)
    types = (shape.AType, shape.BType, shape.CType, shape.ResultType)
    return (
        all(size == COOPMAT_SIZE for size in sizes)
        and types == (half, half, single, single)
        and shape.scope == vk.VK_SCOPE_SUBGROUP_KHR
    )
