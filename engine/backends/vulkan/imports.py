# SPDX-License-Identifier: Apache-2.0
"""Memory that is not the device's own made known to it, so that its copy commands read and write
it: the host's as it lies (VK_EXT_external_memory_host), or a dma-buf.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from engine.backends.base import Array
from engine.backends.devices import MemoryType
from engine.errors import PvrError

# VK_EXTERNAL_MEMORY_HANDLE_TYPE_: DMA_BUF_BIT_EXT, HOST_ALLOCATION_BIT_EXT
_DMA_BUF, _HOST = 0x200, 0x80


class Importer:
    """What imports for one device. `vk` and `call` are api's, `types` the device's memory types."""

    def __init__(
        self, vk: Any, call: Callable[..., Any], pd: Any, dev: Any, types: Sequence[MemoryType]
    ) -> None:
        self._vk, self._call, self._pd, self._dev, self._types = vk, call, pd, dev, types

    def host(self, stack: ExitStack, memory: Array) -> Any:
        """A VkBuffer for copies over memory of the host, which has to outlive `stack`.

        Raises:
            PvrError: the driver does not take this memory, or not as coherent.
        """
        vk, name = self._vk, "vkGetMemoryHostPointerPropertiesEXT"
        found = vk.VkPhysicalDeviceExternalMemoryHostPropertiesEXT()
        vk.vkGetPhysicalDeviceProperties2(self._pd, vk.VkPhysicalDeviceProperties2(pNext=found))
        each = int(found.minImportedHostPointerAlignment)
        if memory.ctypes.data % each or memory.nbytes % each:
            raise PvrError(f"memory is imported in multiples of {each} bytes")
        address = vk.ffi.cast("void*", memory.ctypes.data)
        fits = vk.VkMemoryHostPointerPropertiesEXT()
        self._call(name, vk.vkGetDeviceProcAddr(self._dev, name), self._dev, _HOST, address, fits)
        source = vk.VkImportMemoryHostPointerInfoEXT(handleType=_HOST, pHostPointer=address)
        bits = int(fits.memoryTypeBits)
        return self._bound(self._buffer(stack, _HOST, memory.nbytes, bits, source))

    def dma_buf(self, stack: ExitStack, fd: int, nbytes: int) -> Any:
        """A VkBuffer for copies over a dma-buf; `fd` stays the caller's.

        Raises:
            PvrError: the driver does not take it, or not as coherent.
        """
        vk, name = self._vk, "vkGetMemoryFdPropertiesKHR"
        fits = vk.VkMemoryFdPropertiesKHR()
        self._call(name, vk.vkGetDeviceProcAddr(self._dev, name), self._dev, _DMA_BUF, fd, fits)
        own = os.dup(fd)  # the driver's, if it takes it
        try:
            source = vk.VkImportMemoryFdInfoKHR(handleType=_DMA_BUF, fd=own)
            bits = int(fits.memoryTypeBits)
            made = self._buffer(stack, _DMA_BUF, nbytes, bits, source, dedicated=True)
        except BaseException:
            os.close(own)
            raise
        return self._bound(made)

    def _bound(self, made: tuple[Any, Any]) -> Any:
        """The buffer, with its memory."""
        buffer, memory = made
        bind = self._vk.vkBindBufferMemory
        self._call("vkBindBufferMemory", bind, self._dev, buffer, memory, 0)
        return buffer

    def _buffer(
        self,
        stack: ExitStack,
        handle: int,
        nbytes: int,
        bits: int,
        source: Any,
        dedicated: bool = False,
    ) -> tuple[Any, Any]:
        """A buffer and imported memory for it; the import is the last that may fail."""
        vk, call, dev = self._vk, self._call, self._dev
        external = vk.VkExternalMemoryBufferCreateInfo(handleTypes=handle)
        info = vk.VkBufferCreateInfo(
            pNext=external,
            size=nbytes,
            usage=vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT,
            sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE,
        )
        with ExitStack() as mine:
            buffer = call("vkCreateBuffer", vk.vkCreateBuffer, dev, info, None)
            mine.callback(vk.vkDestroyBuffer, dev, buffer, None)
            need = vk.vkGetBufferMemoryRequirements(dev, buffer)
            bits &= need.memoryTypeBits
            fit = [t for t in self._types if bits >> t.index & 1 and t.visible and t.coherent]
            if not fit or need.size > nbytes:
                raise PvrError("no coherent memory type takes it")
            best = max(fit, key=lambda t: (t.cached, -t.index))
            if dedicated:  # some drivers import a dma-buf in no other way
                whose = vk.VkMemoryDedicatedAllocateInfo(buffer=buffer)
                source.pNext = vk.ffi.addressof(whose)
            allocate = vk.VkMemoryAllocateInfo(
                pNext=source, allocationSize=nbytes, memoryTypeIndex=best.index
            )
            made = call("vkAllocateMemory", vk.vkAllocateMemory, dev, allocate, None)
            mine.callback(vk.vkFreeMemory, dev, made, None)
            stack.push(mine.pop_all())
        return buffer, made
