# SPDX-License-Identifier: Apache-2.0
"""Host memory made known to the device as it lies (VK_EXT_external_memory_host), so that its copy
commands read and write it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from engine.backends.base import Array
from engine.backends.devices import MemoryType
from engine.errors import PvrError

# VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
_HOST = 0x80


def alignment(vk: Any, pd: Any) -> int:
    """Bytes of which address and size of imported memory have to be multiples."""
    found = vk.VkPhysicalDeviceExternalMemoryHostPropertiesEXT()
    vk.vkGetPhysicalDeviceProperties2(pd, vk.VkPhysicalDeviceProperties2(pNext=found))
    return int(found.minImportedHostPointerAlignment)


def host(
    vk: Any,
    call: Callable[..., Any],
    stack: ExitStack,
    dev: Any,
    memory: Array,
    types: Sequence[MemoryType],
) -> Any:
    """A VkBuffer for copies over `memory`, which has to outlive `stack`. `vk` and `call` are api's.

    Raises:
        PvrError: the driver does not take this memory, or not as coherent.
    """
    name = "vkGetMemoryHostPointerPropertiesEXT"
    address = vk.ffi.cast("void*", memory.ctypes.data)
    ask = vk.vkGetDeviceProcAddr(dev, name)
    found = vk.VkMemoryHostPointerPropertiesEXT()
    call(name, ask, dev, _HOST, address, found)
    bits = int(found.memoryTypeBits)
    external = vk.VkExternalMemoryBufferCreateInfo(handleTypes=_HOST)
    info = vk.VkBufferCreateInfo(
        pNext=external,
        size=memory.nbytes,
        usage=vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT,
        sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE,
    )
    buffer = call("vkCreateBuffer", vk.vkCreateBuffer, dev, info, None)
    stack.callback(vk.vkDestroyBuffer, dev, buffer, None)
    bits &= vk.vkGetBufferMemoryRequirements(dev, buffer).memoryTypeBits
    fit = [t for t in types if bits >> t.index & 1 and t.visible and t.coherent]
    if not fit:
        raise PvrError("no coherent memory type takes it")
    best = max(fit, key=lambda t: (t.cached, -t.index))
    source = vk.VkImportMemoryHostPointerInfoEXT(handleType=_HOST, pHostPointer=address)
    allocate = vk.VkMemoryAllocateInfo(
        pNext=source, allocationSize=memory.nbytes, memoryTypeIndex=best.index
    )
    made = call("vkAllocateMemory", vk.vkAllocateMemory, dev, allocate, None)
    stack.callback(vk.vkFreeMemory, dev, made, None)
    call("vkBindBufferMemory", vk.vkBindBufferMemory, dev, buffer, made, 0)
    return buffer
