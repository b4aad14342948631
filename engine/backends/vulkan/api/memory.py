# SPDX-License-Identifier: Apache-2.0
"""Buffers of a device and the memory that is bound to them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.backends.base import Array, DeviceInfo
from engine.backends.devices import MemoryType
from engine.backends.vulkan.api.binding import call, vk
from engine.errors import OutOfMemory, PvrError

# VK_BUFFER_USAGE_ and VK_MEMORY_ALLOCATE_ …DEVICE_ADDRESS_BIT, for which the package lacks names.
_USAGE_ADDRESS, _ALLOCATE_ADDRESS = 0x20000, 0x2
_CHUNK = 256 << 20  # bytes of one memory allocation, unless a buffer is larger


@dataclass
class Placed:
    """A VkBuffer with memory bound to it; `mapped` where the host sees it, `address` (0: none)
    where shaders may reach it without a binding.
    """

    handle: Any
    nbytes: int
    mapped: Array | None
    address: int = 0


@dataclass
class _Piece:
    """One allocation: the buffers in it with their offsets."""

    buffers: list[tuple[str, Any, int]]
    size: int


class Memory:
    """What makes buffers of one device."""

    def __init__(self, dev: Any, info: DeviceInfo) -> None:
        self._dev, self._info = dev, info
        self._max_allocation = int(info.properties["max_allocation"])
        self._addressed = "buffer_address" in info.features

    def place(
        self, stack: ExitStack, sizes: Mapping[str, int], kind: MemoryType, mapped: bool
    ) -> dict[str, Placed]:
        """Makes buffers and binds them to few allocations of one memory type, mapped if so wished.

        Raises:
            OutOfMemory: with figures.
        """
        dev = self._dev
        usage = (
            vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
            | vk.VK_BUFFER_USAGE_UNIFORM_BUFFER_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        )
        if self._addressed:
            usage |= _USAGE_ADDRESS
        total = sum(sizes.values())
        if total > kind.heap_bytes:
            raise OutOfMemory(f"{total} bytes are needed, {self._info.name} has {kind.heap_bytes}")
        pieces: list[_Piece] = []
        for name, nbytes in sizes.items():
            info = vk.VkBufferCreateInfo(
                size=-(-nbytes // 4) * 4, usage=usage, sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE
            )
            handle = call("vkCreateBuffer", vk.vkCreateBuffer, dev, info, None)
            stack.callback(vk.vkDestroyBuffer, dev, handle, None)
            need = vk.vkGetBufferMemoryRequirements(dev, handle)
            if not need.memoryTypeBits >> kind.index & 1:
                raise PvrError(f"{self._info.name} refuses buffers in its memory type {kind.index}")
            start = -(-pieces[-1].size // need.alignment) * need.alignment if pieces else 0
            if not pieces or start + need.size > _CHUNK:
                pieces.append(_Piece([], 0))
                start = 0
            pieces[-1].buffers.append((name, handle, start))
            pieces[-1].size = start + need.size
        out: dict[str, Placed] = {}
        for piece in pieces:
            memory = self._allocate(stack, piece.size, kind, total)
            view: Array | None = None
            if mapped:
                raw = call("vkMapMemory", vk.vkMapMemory, dev, memory, 0, piece.size, 0)
                view = np.frombuffer(raw, np.uint8)
            for name, handle, start in piece.buffers:
                what = "vkBindBufferMemory"
                call(what, vk.vkBindBufferMemory, dev, handle, memory, start)
                part = None if view is None else view[start : start + sizes[name]]
                address = self._address(handle) if self._addressed else 0
                out[name] = Placed(handle, sizes[name], part, address)
        return out

    def _address(self, buffer: Any) -> int:
        """Where shaders find a buffer. (The package's own call gives back what it was asked.)"""
        where = vk.ffi.new("VkBufferDeviceAddressInfo*")
        where.sType = vk.VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO
        where.buffer = buffer
        return int(vk.lib.vkGetBufferDeviceAddress(self._dev, where))

    def _allocate(self, stack: ExitStack, size: int, kind: MemoryType, total: int) -> Any:
        name = self._info.name
        if size > self._max_allocation:
            raise OutOfMemory(
                f"{size} bytes in one piece are needed, {name} allows {self._max_allocation}"
            )
        flags = vk.VkMemoryAllocateFlagsInfo(flags=_ALLOCATE_ADDRESS if self._addressed else 0)
        info = vk.VkMemoryAllocateInfo(pNext=flags, allocationSize=size, memoryTypeIndex=kind.index)
        try:
            memory = call("vkAllocateMemory", vk.vkAllocateMemory, self._dev, info, None)
        except OutOfMemory as e:
            raise OutOfMemory(
                f"{name} has no {size} bytes left (of {total} that are needed; "
                f"its memory is {kind.heap_bytes} bytes)"
            ) from e
        stack.callback(vk.vkFreeMemory, self._dev, memory, None)
        return memory
