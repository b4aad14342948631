# SPDX-License-Identifier: Apache-2.0
"""Vulkan 1.2 as far as compute needs it: instance, device, memory, pipelines, recordings,
submissions.

The only file that imports `vulkan`. What that package needs from us: a struct that another points
to has to stay in a local until the call returns, since nesting by value drops the references; sizes
are never VK_WHOLE_SIZE, which is -1 there and overflows; result codes that it does not know come
out as KeyError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.backends.base import Array, DeviceInfo, Limits
from engine.backends.devices import (
    SUBGROUP_FEATURES,
    Candidate,
    MemoryType,
    NoDevice,
    why_none,
)
from engine.backends.vulkan import features
from engine.backends.vulkan.counters import Counter, Counters
from engine.backends.vulkan.draws import Draws
from engine.backends.vulkan.imports import Importer
from engine.backends.vulkan.timer import Timer
from engine.errors import DeviceLost, OutOfMemory, PvrError

try:
    import vulkan

    vk: Any = vulkan
    _import_error = ""
except Exception as e:  # a sandbox may forbid cffi's callbacks (MemoryError)
    vk = None
    _import_error = f"Vulkan cannot be used: {e}"
    if isinstance(e, OSError):  # the bindings speak of an SDK then
        _import_error = "the Vulkan loader (libvulkan.so.1) is not installed"

# VK_BUFFER_USAGE_ and VK_MEMORY_ALLOCATE_ …DEVICE_ADDRESS_BIT, for which the package lacks names.
_USAGE_ADDRESS, _ALLOCATE_ADDRESS = 0x20000, 0x2
_CHUNK = 256 << 20  # bytes of one memory allocation, unless a buffer is larger
_KINDS = {0: "other", 1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}

# For tests: what the driver answers to a call, as the name of the package's exception; "" to let it
# do its work.
planned: Callable[[str], str] | None = None


def _call(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls into Vulkan; every result code but success becomes an error of ours.

    Raises:
        DeviceLost, OutOfMemory, TimeoutError (VK_TIMEOUT), PvrError for all others.
    """
    try:
        if planned is not None and (answer := planned(what)):
            raise getattr(vk, answer)
        return function(*args)
    except vk.VkErrorDeviceLost as e:
        raise DeviceLost(f"the GPU was lost: {what}") from e
    except (vk.VkErrorOutOfHostMemory, vk.VkErrorOutOfDeviceMemory, vk.VkErrorOutOfPoolMemory) as e:
        raise OutOfMemory(f"the GPU has no memory left: {what}") from e
    except vk.VkTimeout as e:
        raise TimeoutError(what) from e
    except (vk.VkError, vk.VkException) as e:
        raise PvrError(f"{what} failed: {type(e).__name__}") from e
    except KeyError as e:
        raise PvrError(f"{what} failed with VkResult {e}") from e


class Instance:
    """A VkInstance and what can be asked before a device is opened.

    Raises:
        NoDevice: there is no loader, no driver, or it fails.
    """

    def __init__(self) -> None:
        if vk is None:
            raise NoDevice("no_icd", _import_error)
        app = vk.VkApplicationInfo(pApplicationName="pvrd", apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
        info = vk.VkInstanceCreateInfo(pApplicationInfo=app)
        try:
            self.handle = _call("vkCreateInstance", vk.vkCreateInstance, info, None)
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
            found = _call(what, vk.vkEnumeratePhysicalDevices, self.handle)
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
        have |= features.supported(vk, _call, instance, pd, subgroup)
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
    return Candidate(index, kind, api, _compute_family(pd) is not None, info)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else vk.ffi.string(value).decode("utf-8", "replace")


def _three(values: Any) -> tuple[int, int, int]:
    return (values[0], values[1], values[2])


def _compute_family(pd: Any) -> int | None:
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


@dataclass
class Placed:
    """A VkBuffer with memory bound to it; `mapped` where the host sees it, `address` (0: none)
    where shaders may reach it without a binding.
    """

    handle: Any
    nbytes: int
    mapped: Array | None
    address: int = 0


@dataclass(frozen=True)
class Copy:
    """Bytes from one buffer to another."""

    source: Placed
    at: int
    target: Placed
    to: int
    nbytes: int


@dataclass
class _Piece:
    """One allocation: the buffers in it with their offsets."""

    buffers: list[tuple[str, Any, int]]
    size: int


@dataclass(frozen=True)
class Layout:
    """How a kernel is fed: binding 0 uniform, `count` storage buffers after it, push constants."""

    handle: Any
    sets: Any
    count: int


@dataclass(frozen=True)
class Dispatch:
    """One recorded call. `fence_off`: what was dispatched before has to be seen by it."""

    pipeline: Any
    layout: Layout
    descriptors: Any
    push: bytes
    groups: tuple[int, int, int]
    fence_off: bool


class Device:
    """A VkDevice with one queue and one fence. All that it makes goes to the given stack, or is
    freed by close().
    """

    def __init__(self, instance: Any, pd: Any, info: DeviceInfo) -> None:
        self.info = info
        self._where = instance, pd
        self._max_allocation = int(info.properties["max_allocation"])
        self._addressed = "buffer_address" in info.features
        family = _compute_family(pd)
        if family is None:
            raise NoDevice("failed", f"{info.name} has no queue for compute")
        self._family = family
        self.low = False  # does its queue stand behind those of other processes?
        with ExitStack() as stack:
            dev = self._create(pd, family)
            stack.callback(vk.vkDestroyDevice, dev, None)
            self._dev = dev
            self._queue = vk.vkGetDeviceQueue(dev, family, 0)
            fence_info = vk.VkFenceCreateInfo()
            fence = _call("vkCreateFence", vk.vkCreateFence, dev, fence_info, None)
            stack.callback(vk.vkDestroyFence, dev, fence, None)
            self._fence = vk.ffi.new("VkFence[]", [fence])
            info_ = vk.VkPipelineCacheCreateInfo()
            cache = _call("vkCreatePipelineCache", vk.vkCreatePipelineCache, dev, info_, None)
            stack.callback(vk.vkDestroyPipelineCache, dev, cache, None)
            self._cache = cache
            self._copy_cmd = self.commands(stack, 1)[0]
            flags = vk.vkGetPhysicalDeviceQueueFamilyProperties(pd)[family].queueFlags
            self.draws = bool(flags & vk.VK_QUEUE_GRAPHICS_BIT)
            self.timer = self._make_timer(stack, pd)
            self.stack = stack.pop_all()

    def _create(self, pd: Any, family: int) -> Any:
        """The VkDevice. Its queue stands behind those of other processes where the driver knows
        such an order (and lets us: LOW asks for no right, but a driver may refuse it).
        """
        on = features.query(vk, _call, pd, self.info.features)
        extension = features.priority_extension(vk, _call, pd)
        low = vk.VkDeviceQueueGlobalPriorityCreateInfoKHR(
            globalPriority=vk.VK_QUEUE_GLOBAL_PRIORITY_LOW_KHR
        )
        for more in [extension, ""] if extension else [""]:
            queues = [
                vk.VkDeviceQueueCreateInfo(
                    pNext=low if more else None,
                    queueFamilyIndex=family,
                    queueCount=1,
                    pQueuePriorities=[1.0],
                )
            ]
            create = vk.VkDeviceCreateInfo(
                pNext=on.head,
                pQueueCreateInfos=queues,
                ppEnabledExtensionNames=[*on.extensions, *([more] if more else [])],
            )
            try:
                dev = _call("vkCreateDevice", vk.vkCreateDevice, pd, create, None)
            except PvrError:
                if more:
                    continue
                raise
            self.low = bool(more)
            return dev
        raise AssertionError

    # --- memory

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
            raise OutOfMemory(f"{total} bytes are needed, {self.info.name} has {kind.heap_bytes}")
        pieces: list[_Piece] = []
        for name, nbytes in sizes.items():
            info = vk.VkBufferCreateInfo(
                size=-(-nbytes // 4) * 4, usage=usage, sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE
            )
            handle = _call("vkCreateBuffer", vk.vkCreateBuffer, dev, info, None)
            stack.callback(vk.vkDestroyBuffer, dev, handle, None)
            need = vk.vkGetBufferMemoryRequirements(dev, handle)
            if not need.memoryTypeBits >> kind.index & 1:
                raise PvrError(f"{self.info.name} refuses buffers in its memory type {kind.index}")
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
                raw = _call("vkMapMemory", vk.vkMapMemory, dev, memory, 0, piece.size, 0)
                view = np.frombuffer(raw, np.uint8)
            for name, handle, start in piece.buffers:
                what = "vkBindBufferMemory"
                _call(what, vk.vkBindBufferMemory, dev, handle, memory, start)
                part = None if view is None else view[start : start + sizes[name]]
                address = self._address(handle) if self._addressed else 0
                out[name] = Placed(handle, sizes[name], part, address)
        return out

    @property
    def imports(self) -> Importer:
        """What makes other memory known to the device; `info.features` say what it can."""
        pd = self._where[1]
        return Importer(vk, _call, pd, self._dev, memory_types(pd))

    def _address(self, buffer: Any) -> int:
        """Where shaders find a buffer. (The package's own call gives back what it was asked.)"""
        where = vk.ffi.new("VkBufferDeviceAddressInfo*")
        where.sType = vk.VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO
        where.buffer = buffer
        return int(vk.lib.vkGetBufferDeviceAddress(self._dev, where))

    def _allocate(self, stack: ExitStack, size: int, kind: MemoryType, total: int) -> Any:
        name = self.info.name
        if size > self._max_allocation:
            raise OutOfMemory(
                f"{size} bytes in one piece are needed, {name} allows {self._max_allocation}"
            )
        flags = vk.VkMemoryAllocateFlagsInfo(flags=_ALLOCATE_ADDRESS if self._addressed else 0)
        info = vk.VkMemoryAllocateInfo(pNext=flags, allocationSize=size, memoryTypeIndex=kind.index)
        try:
            memory = _call("vkAllocateMemory", vk.vkAllocateMemory, self._dev, info, None)
        except OutOfMemory as e:
            raise OutOfMemory(
                f"{name} has no {size} bytes left (of {total} that are needed; "
                f"its memory is {kind.heap_bytes} bytes)"
            ) from e
        stack.callback(vk.vkFreeMemory, self._dev, memory, None)
        return memory

    # --- pipelines and descriptors

    def layout(self, count: int, push_bytes: int) -> Layout:
        """A layout that lives as long as the device."""
        dev, compute = self._dev, vk.VK_SHADER_STAGE_COMPUTE_BIT
        uniform = vk.VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER
        storage = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
        bindings = [
            vk.VkDescriptorSetLayoutBinding(
                binding=i,
                descriptorType=storage if i else uniform,
                descriptorCount=1,
                stageFlags=compute,
            )
            for i in range(count + 1)
        ]
        info = vk.VkDescriptorSetLayoutCreateInfo(pBindings=bindings)
        what = "vkCreateDescriptorSetLayout"
        sets = _call(what, vk.vkCreateDescriptorSetLayout, dev, info, None)
        self.stack.callback(vk.vkDestroyDescriptorSetLayout, dev, sets, None)
        ranges = [vk.VkPushConstantRange(stageFlags=compute, offset=0, size=push_bytes)]
        layout_info = vk.VkPipelineLayoutCreateInfo(
            setLayoutCount=1,
            pSetLayouts=[sets],
            pushConstantRangeCount=1 if push_bytes else 0,
            pPushConstantRanges=ranges if push_bytes else None,
        )
        what = "vkCreatePipelineLayout"
        handle = _call(what, vk.vkCreatePipelineLayout, dev, layout_info, None)
        self.stack.callback(vk.vkDestroyPipelineLayout, dev, handle, None)
        return Layout(handle, sets, count)

    def pipeline(self, name: str, code: bytes, layout: Layout) -> Any:
        """A pipeline from SPIR-V that lives as long as the device. Make them one at a time."""
        dev = self._dev
        module_info = vk.VkShaderModuleCreateInfo(codeSize=len(code), pCode=code)
        what = "vkCreateShaderModule"
        module = _call(what, vk.vkCreateShaderModule, dev, module_info, None)
        try:
            entry_point = vk.ffi.new("char[]", b"main")
            stage = vk.VkPipelineShaderStageCreateInfo(
                stage=vk.VK_SHADER_STAGE_COMPUTE_BIT, module=module, pName=entry_point
            )
            info = vk.VkComputePipelineCreateInfo(stage=stage, layout=layout.handle)
            create = vk.vkCreateComputePipelines
            made = _call(f"compiling {name}", create, dev, self._cache, 1, [info], None)
        finally:
            vk.vkDestroyShaderModule(dev, module, None)
        self.stack.callback(vk.vkDestroyPipeline, dev, made[0], None)
        return made[0]

    def descriptors(
        self,
        stack: ExitStack,
        params: Placed,
        wanted: Sequence[tuple[Layout, int, Sequence[tuple[Placed, int, int]]]],
    ) -> list[Any]:
        """A descriptor set for each of `wanted`: a layout, where in `params` binding 0 begins, and
        (buffer, offset, bytes) for binding 1 and up.
        """
        if not wanted:
            return []
        dev = self._dev
        uniform_type = vk.VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER
        storage_type = vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
        storage = max(sum(len(ranges) for _, _, ranges in wanted), 1)
        sizes = [
            vk.VkDescriptorPoolSize(type=uniform_type, descriptorCount=len(wanted)),
            vk.VkDescriptorPoolSize(type=storage_type, descriptorCount=storage),
        ]
        pool_info = vk.VkDescriptorPoolCreateInfo(maxSets=len(wanted), pPoolSizes=sizes)
        what = "vkCreateDescriptorPool"
        pool = _call(what, vk.vkCreateDescriptorPool, dev, pool_info, None)
        stack.callback(vk.vkDestroyDescriptorPool, dev, pool, None)
        layouts = [layout.sets for layout, _, _ in wanted]
        set_info = vk.VkDescriptorSetAllocateInfo(descriptorPool=pool, pSetLayouts=layouts)
        what = "vkAllocateDescriptorSets"
        sets = list(_call(what, vk.vkAllocateDescriptorSets, dev, set_info))
        most = self.info.limits.max_uniform_range
        uniforms = {
            at: vk.VkDescriptorBufferInfo(
                buffer=params.handle, offset=at, range=min(params.nbytes - at, most)
            )
            for _, at, _ in wanted
        }
        keep: list[Any] = []
        writes = []
        for target, (_, at, ranges) in zip(sets, wanted, strict=True):
            infos = [
                vk.VkDescriptorBufferInfo(buffer=b.handle, offset=offset, range=nbytes)
                for b, offset, nbytes in ranges
            ]
            keep.append(infos)
            # A write of several descriptors goes on over the bindings that follow, since they are
            # alike.
            for first, kind, some in ((0, uniform_type, [uniforms[at]]), (1, storage_type, infos)):
                if some:
                    writes.append(
                        vk.VkWriteDescriptorSet(
                            dstSet=target,
                            dstBinding=first,
                            descriptorCount=len(some),
                            descriptorType=kind,
                            pBufferInfo=some,
                        )
                    )
        vk.vkUpdateDescriptorSets(dev, len(writes), writes, 0, None)
        return sets

    # --- recording

    def commands(self, stack: ExitStack, count: int) -> list[Any]:
        """Command buffers of a pool of their own."""
        dev = self._dev
        pool_info = vk.VkCommandPoolCreateInfo(
            queueFamilyIndex=self._family,
            flags=vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
        )
        pool = _call("vkCreateCommandPool", vk.vkCreateCommandPool, dev, pool_info, None)
        stack.callback(vk.vkDestroyCommandPool, dev, pool, None)
        info = vk.VkCommandBufferAllocateInfo(
            commandPool=pool,
            level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY,
            commandBufferCount=count,
        )
        return list(_call("vkAllocateCommandBuffers", vk.vkAllocateCommandBuffers, dev, info))

    def record(self, cmd: Any, calls: Sequence[Dispatch]) -> None:
        """Records calls that see what was submitted before, and whose results the host can read."""
        compute, host = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, vk.VK_PIPELINE_STAGE_HOST_BIT
        # It may stand in a submission several times.
        flags = vk.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT
        begin = vk.VkCommandBufferBeginInfo(flags=flags)
        _call("vkBeginCommandBuffer", vk.vkBeginCommandBuffer, cmd, begin)
        self._barrier(cmd, compute, compute, vk.VK_ACCESS_UNIFORM_READ_BIT)
        self._calls(cmd, calls)
        self._barrier(cmd, compute, host)
        _call("vkEndCommandBuffer", vk.vkEndCommandBuffer, cmd)

    def _calls(self, cmd: Any, calls: Sequence[Dispatch]) -> None:
        compute = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT
        point, shader = vk.VK_PIPELINE_BIND_POINT_COMPUTE, vk.VK_SHADER_STAGE_COMPUTE_BIT
        current: Any = None
        for call in calls:
            if call.fence_off:
                self._barrier(cmd, compute, compute)
            if current is not call.pipeline:
                current = call.pipeline
                vk.vkCmdBindPipeline(cmd, point, current)
            sets = [call.descriptors]
            vk.vkCmdBindDescriptorSets(cmd, point, call.layout.handle, 0, 1, sets, 0, None)
            if call.push:
                push = vk.ffi.from_buffer(call.push)
                vk.vkCmdPushConstants(cmd, call.layout.handle, shader, 0, len(call.push), push)
            vk.vkCmdDispatch(cmd, *call.groups)

    def count(self, calls: Sequence[Dispatch], seconds: float) -> dict[Counter, float]:
        """What the hardware's counters say of these calls; nothing where the driver has none.
        `seconds` bounds each of the runs that are needed for it.

        Raises:
            TimeoutError, DeviceLost, PvrError: it has them, and they fail.
        """
        if "counters" not in self.info.features:
            return {}
        with ExitStack() as stack:
            reset, counted = self.commands(stack, 2)

            def submit(submission: Any) -> None:
                self.submit([submission])
                self.wait(seconds)

            counters = Counters(vk, _call, *self._where, self._dev, self._family)
            return counters.count(
                stack, (reset, counted), lambda cmd: self._calls(cmd, calls), submit
            )

    def _barrier(self, cmd: Any, before: int, after: int, more: int = 0) -> None:
        """What comes after sees what was written before. `more`: what else it reads, as it may be
        parameter words that the sequence before has written.
        """
        transfer, host = vk.VK_PIPELINE_STAGE_TRANSFER_BIT, vk.VK_PIPELINE_STAGE_HOST_BIT
        writes = {transfer: vk.VK_ACCESS_TRANSFER_WRITE_BIT}
        reads = {
            transfer: vk.VK_ACCESS_TRANSFER_READ_BIT | vk.VK_ACCESS_TRANSFER_WRITE_BIT,
            host: vk.VK_ACCESS_HOST_READ_BIT,
        }
        shader = vk.VK_ACCESS_SHADER_READ_BIT | vk.VK_ACCESS_SHADER_WRITE_BIT
        memory = vk.VkMemoryBarrier(
            srcAccessMask=writes.get(before, vk.VK_ACCESS_SHADER_WRITE_BIT),
            dstAccessMask=reads.get(after, shader) | more,
        )
        vk.vkCmdPipelineBarrier(cmd, before, after, 0, 1, [memory], 0, None, 0, None)

    def carry(self, cmd: Any, copies: Sequence[Copy], up: bool) -> None:
        """Records copies that do not meet one another: `up`, to what is dispatched next; else of
        what was, to the host. It may be recorded anew.
        """
        compute, transfer = (
            vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
            vk.VK_PIPELINE_STAGE_TRANSFER_BIT,
        )
        begin = vk.VkCommandBufferBeginInfo()
        _call("vkBeginCommandBuffer", vk.vkBeginCommandBuffer, cmd, begin)
        self._barrier(cmd, compute, transfer)
        for c in copies:
            region = vk.VkBufferCopy(c.at, c.to, c.nbytes)
            vk.vkCmdCopyBuffer(cmd, c.source.handle, c.target.handle, 1, [region])
        self._barrier(cmd, transfer, compute if up else vk.VK_PIPELINE_STAGE_HOST_BIT)
        _call("vkEndCommandBuffer", vk.vkEndCommandBuffer, cmd)

    def copying(
        self,
        source: Placed,
        at: int,
        target: Placed,
        to: int,
        nbytes: int,
        times: int = 1,
        timed: bool = False,
    ) -> Any:
        """A submission that copies, `times` in order; valid until the next of these two. `timed`:
        by the device's clock, if it has one.
        """
        region, transfer = vk.VkBufferCopy(at, to, nbytes), vk.VK_PIPELINE_STAGE_TRANSFER_BIT

        def record(cmd: Any) -> None:
            for i in range(times):
                if i:
                    self._barrier(cmd, transfer, transfer)
                vk.vkCmdCopyBuffer(cmd, source.handle, target.handle, 1, [region])

        return self._transfer(record, timed)

    def drawing(
        self, stack: ExitStack, shaders: tuple[bytes, bytes], target: Placed
    ) -> Callable[[int, bool], Any]:
        """Makes submissions of draws over a row of float pixels, which is then copied to `target`
        and is as long; how many, and whether they wait for one another (Draws.record). Timed by the
        device's clock, if it has one; the queue has to draw (self.draws).
        """
        draws = Draws(vk, _call, stack, self._dev, shaders, target.nbytes // 4)

        def submission(count: int, in_turn: bool) -> Any:
            return self._transfer(
                lambda cmd: draws.record(cmd, count, in_turn, target.handle), timed=True
            )

        return submission

    def zeroing(self, target: Placed) -> Any:
        """A submission that fills a buffer with zeros; valid until the next of these two."""
        size = -(-target.nbytes // 4) * 4
        return self._transfer(lambda cmd: vk.vkCmdFillBuffer(cmd, target.handle, 0, size, 0))

    def _transfer(self, record: Callable[[Any], None], timed: bool = False) -> Any:
        cmd = self._copy_cmd
        compute, transfer = (
            vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT,
            vk.VK_PIPELINE_STAGE_TRANSFER_BIT,
        )
        flags = vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT
        begin = vk.VkCommandBufferBeginInfo(flags=flags)
        _call("vkBeginCommandBuffer", vk.vkBeginCommandBuffer, cmd, begin)
        self._barrier(cmd, compute, transfer)
        record(cmd)
        self._barrier(cmd, transfer, compute)
        self._barrier(cmd, transfer, vk.VK_PIPELINE_STAGE_HOST_BIT)
        _call("vkEndCommandBuffer", vk.vkEndCommandBuffer, cmd)
        return self.submission([cmd], timed)

    # --- submitting

    def _make_timer(self, stack: ExitStack, pd: Any) -> Timer | None:
        families = vk.vkGetPhysicalDeviceQueueFamilyProperties(pd)
        if bits := families[self._family].timestampValidBits:
            period = vk.vkGetPhysicalDeviceProperties(pd).limits.timestampPeriod
            first, second = self.commands(stack, 2)
            return Timer(vk, _call, stack, self._dev, (first, second), bits, period)
        return None

    def submission(self, commands: Sequence[Any], timed: bool = False) -> Any:
        """Command buffers in order, ready for submit(); can be used again and again. `timed`: with
        the device's clock around them, if it has one (self.timer).
        """
        if timed and self.timer is not None:
            commands = [self.timer.before, *commands, self.timer.after]
        buffers = vk.ffi.new("VkCommandBuffer[]", list(commands))
        info = vk.VkSubmitInfo(commandBufferCount=len(commands), pCommandBuffers=buffers)
        return vk.ffi.new("VkSubmitInfo[]", [info]), info, buffers

    def submit(self, submission: Any) -> None:
        """Hands it to the queue. wait() before the next.

        Raises:
            DeviceLost
        """
        _call("vkResetFences", vk.vkResetFences, self._dev, 1, self._fence)
        fence = self._fence[0]
        _call("vkQueueSubmit", vk.vkQueueSubmit, self._queue, 1, submission[0], fence)

    def wait(self, seconds: float) -> None:
        """Until the submission is done.

        Raises:
            TimeoutError, DeviceLost
        """
        timeout = int(seconds * 1e9)
        what = "vkWaitForFences"
        _call(what, vk.vkWaitForFences, self._dev, 1, self._fence, 1, timeout)
