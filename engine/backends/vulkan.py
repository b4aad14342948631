# SPDX-License-Identifier: Apache-2.0
"""A GPU through Vulkan 1.2: Programs are recorded once and replayed. The only file that imports `vulkan`.

A slice is one vkQueueSubmit of the command buffers of its sequences and one wait for a fence, with a deadline.

What the `vulkan` package needs from us: a struct that another points to has to stay in a local until the call
returns, since nesting by value drops the references; sizes are never VK_WHOLE_SIZE, which is -1 there and
overflows; result codes that it does not know come out as KeyError.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

import kernels
from engine.backends.base import Array, DeviceInfo, Limits, RunStats
from engine.backends.cpu import as_bytes
from engine.backends.devices import (
    SUBGROUP_FEATURES,
    Candidate,
    MemoryPlan,
    MemoryType,
    NoDevice,
    Verdict,
    judge,
    misfit,
    plan_memory,
    why_none,
)
from engine.errors import DeviceLost, InvalidArgument, OutOfMemory, PvrError
from engine.program import Buffer, Call, Program

try:
    import vulkan

    vk: Any = vulkan
except (
    Exception
) as e:  # no loader (OSError), or a sandbox that forbids cffi's callbacks (MemoryError)
    vk = None
    _import_error = str(e)

_CHUNK = 256 << 20  # bytes of one memory allocation, unless a buffer is larger
_STAGING = 16 << 20
_KINDS = {0: "other", 1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}
_FEATURES_CORE = {"shaderInt16": "int16", "shaderInt64": "int64", "shaderFloat64": "fp64"}
_FEATURES_11 = {"storageBuffer16BitAccess": "storage16"}
_FEATURES_12 = {
    "shaderFloat16": "fp16",
    "shaderInt8": "int8",
    "storageBuffer8BitAccess": "storage8",
    "vulkanMemoryModel": "memory_model",
}


def _call(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls into Vulkan; every result code but success becomes an error of ours.

    Raises:
        DeviceLost, OutOfMemory, TimeoutError (VK_TIMEOUT), PvrError for all others.
    """
    try:
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


class _Instance:
    """A VkInstance and what can be asked before a device is opened."""

    def __init__(self) -> None:
        if vk is None:
            raise NoDevice("no_icd", f"the Vulkan loader is missing (libvulkan1): {_import_error}")
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
        try:
            found = _call("vkEnumeratePhysicalDevices", vk.vkEnumeratePhysicalDevices, self.handle)
        except PvrError:
            return []  # the loader answers "initialization failed" when no driver is installed
        return [(pd, _describe(i, pd)) for i, pd in enumerate(found)]


def list_devices(allow_software: bool = False, want: str = "") -> list[Verdict]:
    """All devices that the loader knows, each with the reason why it is not taken.

    Raises:
        NoDevice: there is none to list; its code says why.
    """
    instance = _Instance()
    try:
        verdicts = judge([c for _, c in instance.devices()], allow_software, want)
    finally:
        instance.close()
    if not verdicts:
        raise why_none([])
    return verdicts


def _describe(index: int, pd: Any) -> Candidate:
    core = vk.vkGetPhysicalDeviceProperties(pd)
    api = (core.apiVersion >> 22 & 0x7F, core.apiVersion >> 12 & 0x3FF)
    lim = core.limits
    families = vk.vkGetPhysicalDeviceQueueFamilyProperties(pd)
    properties: dict[str, str | int] = {
        "vendor": f"{core.vendorID:#06x}",
        "device": f"{core.deviceID:#06x}",
        "driver_version": core.driverVersion,
        "api": f"{api[0]}.{api[1]}",
    }
    features: set[str] = set()
    driver, subgroup = "", 1
    if api >= (1, 2):
        v12 = vk.VkPhysicalDeviceVulkan12Properties()
        v11 = vk.VkPhysicalDeviceVulkan11Properties(pNext=v12)
        props = vk.VkPhysicalDeviceProperties2(pNext=v11)
        vk.vkGetPhysicalDeviceProperties2(pd, props)
        driver = f"{_text(v12.driverName)} {_text(v12.driverInfo)}".strip()
        conformance = v12.conformanceVersion
        properties |= {
            "uuid": bytes(v11.deviceUUID).hex(),
            "driver_id": v12.driverID,
            "conformant": int(conformance.major > 0),
            "max_allocation": v11.maxMemoryAllocationSize,
        }
        if v11.subgroupSupportedStages & vk.VK_SHADER_STAGE_COMPUTE_BIT:
            subgroup = v11.subgroupSize
            features |= {
                f
                for i, f in enumerate(SUBGROUP_FEATURES)
                if v11.subgroupSupportedOperations >> i & 1
            }
        have, _keep = _features(pd)
        features |= have
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
        features=frozenset(features),
        properties=properties,
    )
    return Candidate(index, kind, api, _compute_family(families) is not None, info)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else vk.ffi.string(value).decode("utf-8", "replace")


def _three(values: Any) -> tuple[int, int, int]:
    return (values[0], values[1], values[2])


def _compute_family(families: Any) -> int | None:
    for i, family in enumerate(families):
        if family.queueFlags & vk.VK_QUEUE_COMPUTE_BIT and family.queueCount:
            return i
    return None


def _features(pd: Any) -> tuple[set[str], tuple[Any, ...]]:
    """Our names of the features that are there, and structs that enable just those (the first heads the chain)."""
    v12 = vk.VkPhysicalDeviceVulkan12Features()
    v11 = vk.VkPhysicalDeviceVulkan11Features(pNext=v12)
    core = vk.VkPhysicalDeviceFeatures2(pNext=v11)
    vk.vkGetPhysicalDeviceFeatures2(pd, core)
    have: set[str] = set()
    on: list[dict[str, int]] = []
    for struct, names in (
        (core.features, _FEATURES_CORE),
        (v11, _FEATURES_11),
        (v12, _FEATURES_12),
    ):
        there = [field for field in names if getattr(struct, field)]
        have |= {names[field] for field in there}
        on.append(dict.fromkeys(there, 1))
    on12 = vk.VkPhysicalDeviceVulkan12Features(**on[2])
    on11 = vk.VkPhysicalDeviceVulkan11Features(pNext=on12, **on[1])
    onf = vk.VkPhysicalDeviceFeatures(**on[0])
    head = vk.VkPhysicalDeviceFeatures2(pNext=on11, features=onf)
    return have, (head, on11, on12, onf)


@dataclass
class _Placed:
    """A VkBuffer with memory bound to it; `mapped` where the host sees it."""

    handle: Any
    nbytes: int
    mapped: Array | None


@dataclass
class _Piece:
    """One allocation: the buffers in it with their offsets."""

    buffers: list[tuple[str, Any, int]]
    size: int


@dataclass
class _Pipeline:
    handle: Any
    layout: Any
    set_layout: Any
    writes: tuple[bool, ...]  # by binding 1..
    reads: tuple[bool, ...]


class VulkanWeights:
    """Named blobs in device memory."""

    def __init__(self, backend: VulkanBackend, blobs: Mapping[str, Array]) -> None:
        self._stack = ExitStack()
        with ExitStack() as stack:
            flat = {name: as_bytes(blob) for name, blob in blobs.items()}
            sizes = {name: max(blob.nbytes, 4) for name, blob in flat.items()}
            self.buffers = backend._place(stack, sizes, backend._plan.device)
            for name, blob in flat.items():
                backend._upload(self.buffers[name], blob, 0)
            self._stack = stack.pop_all()
        backend._live.add(self)
        self._backend = backend
        self._nbytes = sum(sizes.values())

    def nbytes(self) -> int:
        return self._nbytes

    def close(self) -> None:
        self.buffers = {}
        self._backend._live.discard(self)
        self._backend._release(self._stack)


class VulkanExecutable:
    """A Program recorded as one command buffer a sequence, over buffers of its own."""

    def __init__(self, backend: VulkanBackend, program: Program, weights: VulkanWeights) -> None:
        try:
            program.check()
        except ValueError as e:
            raise InvalidArgument(str(e)) from e
        self.program = program
        self._backend = backend
        self._weights = weights  # recordings point into them
        self._submits: dict[tuple[str, ...], tuple[Any, ...]] = {}
        self._recorded: dict[str, Any] = {}
        self._closed = False
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._buffers = self._allocate(stack)
            self._record(stack)
            self._stack = stack.pop_all()
        backend._live.add(self)

    def _allocate(self, stack: ExitStack) -> dict[str, _Placed]:
        backend, plan = self._backend, self._backend._plan
        own: dict[str, dict[str, int]] = {"device": {}, "upload": {}, "readback": {}}
        out: dict[str, _Placed] = {}
        for buf in self.program.buffers.values():
            if buf.kind == "weight":
                placed = self._weights.buffers.get(buf.name)
                if placed is None or placed.nbytes < buf.nbytes:
                    raise InvalidArgument(f"the weights have no {buf.name!r} of {buf.nbytes} bytes")
                out[buf.name] = placed
            else:
                where = {"params": "upload", "input": "upload", "output": "readback"}
                own[where.get(buf.kind, "device")][buf.name] = buf.nbytes
        for use, sizes in own.items():
            out |= backend._place(stack, sizes, getattr(plan, use))
        for name in [n for sizes in own.values() for n in sizes]:
            backend._zero(out[name])
        return out

    def _record(self, stack: ExitStack) -> None:
        backend = self._backend
        dev = backend._device
        pipelines: dict[tuple[str, str], _Pipeline] = {}
        sets: dict[tuple[Any, ...], int] = {}
        layouts: list[Any] = []
        wanted: list[tuple[Call, tuple[Any, ...]]] = []
        for calls in self.program.sequences.values():
            for call in calls:
                pipe = pipelines.get((call.op, call.variant))
                if pipe is None:
                    pipe = backend.pipeline(call.op, call.variant)
                    pipelines[call.op, call.variant] = pipe
                self._fit(call, len(pipe.writes))
                key = (len(pipe.writes), call.bindings)
                if key not in sets:
                    sets[key] = len(layouts)
                    layouts.append(pipe.set_layout)
                    wanted.append((call, key))
        bound = self._bind(stack, wanted, layouts)
        pool_info = vk.VkCommandPoolCreateInfo(queueFamilyIndex=backend._family)
        pool = _call("vkCreateCommandPool", vk.vkCreateCommandPool, dev, pool_info, None)
        stack.callback(vk.vkDestroyCommandPool, dev, pool, None)
        names = list(self.program.sequences)
        if not names:
            return
        cmd_info = vk.VkCommandBufferAllocateInfo(
            commandPool=pool,
            level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY,
            commandBufferCount=len(names),
        )
        commands = _call("vkAllocateCommandBuffers", vk.vkAllocateCommandBuffers, dev, cmd_info)
        for cmd, name in zip(commands, names, strict=True):
            self._record_sequence(cmd, self.program.sequences[name], pipelines, sets, bound)
            self._recorded[name] = cmd

    def _fit(self, call: Call, count: int) -> None:
        """Holds a call against the device's limits and its contract: a driver would not say no."""
        limits = self._backend.info.limits
        contract = kernels.op(call.op)
        where = f"{call.op}.{call.variant}"
        if len(call.bindings) != count:
            raise InvalidArgument(f"{where} takes {count} bindings, got {len(call.bindings)}")
        if len(call.push) != 4 * len(contract.push):
            raise InvalidArgument(f"{where} takes {4 * len(contract.push)} bytes of push constants")
        most = limits.max_workgroup_count
        if any(not 0 < g <= m for g, m in zip(call.groups, most, strict=True)):
            raise InvalidArgument(f"{where}: {call.groups} groups, {most} allowed")
        for b in call.bindings:
            size = self._size(call, b.buffer, b.offset, b.nbytes)
            if size > limits.max_storage_range:
                raise InvalidArgument(
                    f"{where} binds {size} bytes of {b.buffer!r}, {limits.max_storage_range} allowed"
                )

    def _size(self, call: Call, buffer: str, offset: int, nbytes: int | None) -> int:
        return self.program.buffers[buffer].nbytes - offset if nbytes is None else nbytes

    def _bind(
        self, stack: ExitStack, wanted: Sequence[tuple[Call, tuple[Any, ...]]], layouts: list[Any]
    ) -> Any:
        if not layouts:
            return []
        dev = self._backend._device
        storage = sum(len(call.bindings) for call, _ in wanted)
        sizes = [
            vk.VkDescriptorPoolSize(
                type=vk.VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER, descriptorCount=len(layouts)
            ),
            vk.VkDescriptorPoolSize(
                type=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, descriptorCount=max(storage, 1)
            ),
        ]
        pool_info = vk.VkDescriptorPoolCreateInfo(
            maxSets=len(layouts), poolSizeCount=len(sizes), pPoolSizes=sizes
        )
        pool = _call("vkCreateDescriptorPool", vk.vkCreateDescriptorPool, dev, pool_info, None)
        stack.callback(vk.vkDestroyDescriptorPool, dev, pool, None)
        set_info = vk.VkDescriptorSetAllocateInfo(
            descriptorPool=pool, descriptorSetCount=len(layouts), pSetLayouts=layouts
        )
        bound = _call("vkAllocateDescriptorSets", vk.vkAllocateDescriptorSets, dev, set_info)
        params = self._buffers["params"]
        uniform = vk.VkDescriptorBufferInfo(
            buffer=params.handle,
            offset=0,
            range=min(params.nbytes, self._backend.info.limits.max_uniform_range),
        )
        keep: list[Any] = [uniform]
        writes = []
        for target, (call, _) in zip(bound, wanted, strict=True):
            infos = [
                vk.VkDescriptorBufferInfo(
                    buffer=self._buffers[b.buffer].handle,
                    offset=b.offset,
                    range=self._size(call, b.buffer, b.offset, b.nbytes),
                )
                for b in call.bindings
            ]
            keep += infos
            writes.append(
                vk.VkWriteDescriptorSet(
                    dstSet=target,
                    dstBinding=0,
                    descriptorCount=1,
                    descriptorType=vk.VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER,
                    pBufferInfo=[uniform],
                )
            )
            if infos:
                # One write goes on over the bindings that follow, since they are alike.
                writes.append(
                    vk.VkWriteDescriptorSet(
                        dstSet=target,
                        dstBinding=1,
                        descriptorCount=len(infos),
                        descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                        pBufferInfo=infos,
                    )
                )
        vk.vkUpdateDescriptorSets(dev, len(writes), writes, 0, None)
        del keep
        return bound

    def _record_sequence(
        self,
        cmd: Any,
        calls: Sequence[Call],
        pipelines: Mapping[tuple[str, str], _Pipeline],
        sets: Mapping[tuple[Any, ...], int],
        bound: Any,
    ) -> None:
        compute = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT
        begin = vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT)
        _call("vkBeginCommandBuffer", vk.vkBeginCommandBuffer, cmd, begin)
        # What earlier command buffers of the submission wrote.
        _barrier(cmd, compute, compute)
        written: list[tuple[str, int, int]] = []
        read: list[tuple[str, int, int]] = []
        current: Any = None
        for call in calls:
            pipe = pipelines[call.op, call.variant]
            ranges = [
                (b.buffer, b.offset, b.offset + self._size(call, b.buffer, b.offset, b.nbytes))
                for b in call.bindings
            ]
            reads = [r for r, on in zip(ranges, pipe.reads, strict=True) if on]
            writes = [r for r, on in zip(ranges, pipe.writes, strict=True) if on]
            if _meet(reads + writes, written) or _meet(writes, read):
                _barrier(cmd, compute, compute)
                written, read = [], []
            written += writes
            read += reads
            if current is not pipe:
                vk.vkCmdBindPipeline(cmd, vk.VK_PIPELINE_BIND_POINT_COMPUTE, pipe.handle)
                current = pipe
            target = bound[sets[len(pipe.writes), call.bindings]]
            vk.vkCmdBindDescriptorSets(
                cmd, vk.VK_PIPELINE_BIND_POINT_COMPUTE, pipe.layout, 0, 1, [target], 0, None
            )
            if call.push:
                push = vk.ffi.from_buffer(call.push)
                vk.vkCmdPushConstants(
                    cmd, pipe.layout, vk.VK_SHADER_STAGE_COMPUTE_BIT, 0, len(call.push), push
                )
            vk.vkCmdDispatch(cmd, *call.groups)
        _barrier(cmd, compute, vk.VK_PIPELINE_STAGE_HOST_BIT)
        _call("vkEndCommandBuffer", vk.vkEndCommandBuffer, cmd)

    def _range(self, name: str, nbytes: int, offset: int) -> tuple[_Placed, Buffer]:
        if self._closed:
            raise InvalidArgument("the executable is closed")
        buf = self.program.buffers.get(name)
        if buf is None:
            raise InvalidArgument(f"there is no buffer {name!r}")
        if offset < 0 or nbytes < 0 or offset + nbytes > buf.nbytes:
            raise InvalidArgument(
                f"{nbytes} bytes at {offset} are outside of {name!r} ({buf.nbytes} bytes)"
            )
        return self._buffers[name], buf

    def write(self, buffer: str, data: Array | bytes, offset: int = 0) -> None:
        source = as_bytes(data)
        placed, buf = self._range(buffer, source.nbytes, offset)
        if buf.kind == "weight":
            raise InvalidArgument(f"{buffer!r} is a weight")
        self._backend._upload(placed, source, offset)

    def read(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        placed, _ = self._range(buffer, nbytes, offset)
        return self._backend._download(placed, nbytes, offset)

    def run(self, *sequences: str) -> RunStats:
        if self._closed:
            raise InvalidArgument("the executable is closed")
        submit = self._submits.get(sequences)
        if submit is None:
            if missing := [s for s in sequences if s not in self._recorded]:
                raise InvalidArgument(f"the program has no sequence {missing[0]!r}")
            commands = vk.ffi.new("VkCommandBuffer[]", [self._recorded[s] for s in sequences])
            info = vk.VkSubmitInfo(commandBufferCount=len(sequences), pCommandBuffers=commands)
            submit = (vk.ffi.new("VkSubmitInfo[]", [info]), info, commands)
            self._submits[sequences] = submit
        started = time.perf_counter()
        self._backend._submit(submit[0])
        wall = time.perf_counter() - started
        self._backend._counters["dispatches"] += sum(
            len(self.program.sequences[s]) for s in sequences
        )
        return RunStats(wall_s=wall)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._buffers, self._recorded, self._submits = {}, {}, {}
            self._backend._live.discard(self)
            self._backend._release(self._stack)


def _barrier(cmd: Any, before: int, after: int) -> None:
    host = vk.VK_PIPELINE_STAGE_HOST_BIT
    transfer = vk.VK_PIPELINE_STAGE_TRANSFER_BIT
    access = {host: vk.VK_ACCESS_HOST_READ_BIT, transfer: vk.VK_ACCESS_TRANSFER_READ_BIT}
    source = (
        vk.VK_ACCESS_TRANSFER_WRITE_BIT if before == transfer else vk.VK_ACCESS_SHADER_WRITE_BIT
    )
    target = access.get(after, vk.VK_ACCESS_SHADER_READ_BIT | vk.VK_ACCESS_SHADER_WRITE_BIT)
    memory = vk.VkMemoryBarrier(srcAccessMask=source, dstAccessMask=target)
    vk.vkCmdPipelineBarrier(cmd, before, after, 0, 1, [memory], 0, None, 0, None)


def _meet(some: Sequence[tuple[str, int, int]], others: Sequence[tuple[str, int, int]]) -> bool:
    """Whether a range of the one meets a range of the others."""
    return any(
        a == b and begin < stop and start < end
        for a, begin, end in some
        for b, start, stop in others
    )


class VulkanBackend:
    """A GPU, opened.

    `allow_software` admits devices of type CPU, `want` names one device, `deadline_s` bounds a slice (0: 10 s,
    30 s on a software device). `lose_at` makes the n-th submission from opening on report device loss (0: none);
    it can be set at any time. `force_staging` treats the device as one whose memory the host cannot see.

    Raises:
        NoDevice: none is usable; the code says why.
    """

    def __init__(
        self,
        allow_software: bool = False,
        want: str = "",
        deadline_s: float = 0.0,
        lose_at: int = 0,
        force_staging: bool = False,
    ) -> None:
        self.lose_at = lose_at
        self._counters = dict.fromkeys(
            ("submissions", "dispatches", "bytes_uploaded", "bytes_read_back"), 0
        )
        self._pipelines: dict[tuple[str, str], _Pipeline] = {}
        self._layouts: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._live: set[VulkanExecutable | VulkanWeights] = set()
        self._lost = ""
        self._pending = False
        self._lock = threading.Lock()
        self._stack = ExitStack()
        with ExitStack() as stack:
            instance = _Instance()
            stack.callback(instance.close)
            found = instance.devices()
            verdicts = judge([c for _, c in found], allow_software, want)
            chosen = next((v.candidate for v in verdicts if v.chosen), None)
            if chosen is None:
                raise why_none(verdicts)
            self.info = chosen.info
            self.deadline_s = deadline_s or (30.0 if self.info.software else 10.0)
            self._open(stack, found[chosen.index][0], force_staging)
            self._stack = stack.pop_all()

    def _open(self, stack: ExitStack, pd: Any, force_staging: bool) -> None:
        family = _compute_family(vk.vkGetPhysicalDeviceQueueFamilyProperties(pd))
        assert family is not None  # judge() refused devices without one
        self._family = family
        self._plan, self._max_allocation = _memory(pd, self.info, force_staging)
        queue_info = vk.VkDeviceQueueCreateInfo(
            queueFamilyIndex=family, queueCount=1, pQueuePriorities=[1.0]
        )
        _, chain = _features(pd)
        info = vk.VkDeviceCreateInfo(pNext=chain[0], pQueueCreateInfos=[queue_info])
        self._device = _call("vkCreateDevice", vk.vkCreateDevice, pd, info, None)
        stack.callback(vk.vkDestroyDevice, self._device, None)
        self._queue = vk.vkGetDeviceQueue(self._device, family, 0)
        dev = self._device
        fence_info = vk.VkFenceCreateInfo()
        fence = _call("vkCreateFence", vk.vkCreateFence, dev, fence_info, None)
        stack.callback(vk.vkDestroyFence, dev, fence, None)
        self._fence = vk.ffi.new("VkFence[]", [fence])
        cache_info = vk.VkPipelineCacheCreateInfo()
        self._cache = _call(
            "vkCreatePipelineCache", vk.vkCreatePipelineCache, dev, cache_info, None
        )
        stack.callback(vk.vkDestroyPipelineCache, dev, self._cache, None)
        pool_info = vk.VkCommandPoolCreateInfo(
            queueFamilyIndex=family, flags=vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        )
        pool = _call("vkCreateCommandPool", vk.vkCreateCommandPool, dev, pool_info, None)
        stack.callback(vk.vkDestroyCommandPool, dev, pool, None)
        cmd_info = vk.VkCommandBufferAllocateInfo(
            commandPool=pool, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1
        )
        commands = _call("vkAllocateCommandBuffers", vk.vkAllocateCommandBuffers, dev, cmd_info)
        self._copy_cmd = commands[0]
        self._staging: _Placed | None = None
        self._staging_stack = stack.enter_context(ExitStack())

    # --- what users of a backend call

    def weights(self, blobs: Mapping[str, Array]) -> VulkanWeights:
        return VulkanWeights(self, blobs)

    def executable(self, program: Program, weights: Any) -> VulkanExecutable:
        return VulkanExecutable(self, program, weights)

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def close(self) -> None:
        """Frees all, executables and weights that are still open too."""
        for thing in list(self._live):
            thing.close()
        self._release(self._stack)
        self._pipelines, self._layouts = {}, {}

    # --- pipelines

    def misfit(self, op: str, variant: str) -> str:
        """Why the device cannot have this variant; "" when it can."""
        entry = kernels.manifest().get(op, {}).get(variant)
        if entry is None:
            return "it was not compiled"
        return misfit(entry, self.info.limits, self.info.features)

    def pipeline(self, op: str, variant: str) -> _Pipeline:
        """The pipeline of a variant, made at its first use.

        Raises:
            InvalidArgument: there is no such variant, or the device must not get it.
        """
        made = self._pipelines.get((op, variant))
        if made is None:
            if why := self.misfit(op, variant):
                raise InvalidArgument(f"{op}.{variant} is not for {self.info.name}: {why}")
            made = self._compile(op, variant)
            self._pipelines[op, variant] = made
        return made

    def _compile(self, op: str, variant: str) -> _Pipeline:
        dev = self._device
        contract = kernels.op(op)
        entry = kernels.manifest()[op][variant]
        layout, set_layout = self._layout(len(contract.bindings), 4 * len(contract.push))
        code = (kernels.artifacts() / entry["file"]).read_bytes()
        module_info = vk.VkShaderModuleCreateInfo(codeSize=len(code), pCode=code)
        module = _call("vkCreateShaderModule", vk.vkCreateShaderModule, dev, module_info, None)
        try:
            entry_point = vk.ffi.new("char[]", b"main")
            stage = vk.VkPipelineShaderStageCreateInfo(
                stage=vk.VK_SHADER_STAGE_COMPUTE_BIT, module=module, pName=entry_point
            )
            info = vk.VkComputePipelineCreateInfo(stage=stage, layout=layout)
            made = _call(
                f"compiling {op}.{variant}",
                vk.vkCreateComputePipelines,
                *(dev, self._cache, 1, [info], None),
            )
        finally:
            vk.vkDestroyShaderModule(dev, module, None)
        self._stack.callback(vk.vkDestroyPipeline, dev, made[0], None)
        return _Pipeline(
            made[0],
            layout,
            set_layout,
            tuple("w" in b.access for b in contract.bindings),
            tuple("r" in b.access for b in contract.bindings),
        )

    def _layout(self, count: int, push_bytes: int) -> tuple[Any, Any]:
        """Pipeline and set layout for a number of storage bindings and push constants."""
        made = self._layouts.get((count, push_bytes))
        if made is not None:
            return made
        dev, compute = self._device, vk.VK_SHADER_STAGE_COMPUTE_BIT
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
        set_layout = _call(what, vk.vkCreateDescriptorSetLayout, dev, info, None)
        self._stack.callback(vk.vkDestroyDescriptorSetLayout, dev, set_layout, None)
        ranges = [vk.VkPushConstantRange(stageFlags=compute, offset=0, size=push_bytes)]
        layout_info = vk.VkPipelineLayoutCreateInfo(
            setLayoutCount=1,
            pSetLayouts=[set_layout],
            pushConstantRangeCount=1 if push_bytes else 0,
            pPushConstantRanges=ranges if push_bytes else None,
        )
        what = "vkCreatePipelineLayout"
        layout = _call(what, vk.vkCreatePipelineLayout, dev, layout_info, None)
        self._stack.callback(vk.vkDestroyPipelineLayout, dev, layout, None)
        self._layouts[count, push_bytes] = (layout, set_layout)
        return layout, set_layout

    # --- memory

    def _place(
        self, stack: ExitStack, sizes: Mapping[str, int], kind: MemoryType
    ) -> dict[str, _Placed]:
        """Makes buffers and binds them to few allocations of one memory type; mapped where the plan allows it."""
        dev = self._device
        usage = (
            vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
            | vk.VK_BUFFER_USAGE_UNIFORM_BUFFER_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
            | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
        )
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
        mapped = kind.visible and (self._plan.unified or kind is not self._plan.device)
        out: dict[str, _Placed] = {}
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
                out[name] = _Placed(handle, sizes[name], part)
        return out

    def _allocate(self, stack: ExitStack, size: int, kind: MemoryType, total: int) -> Any:
        if size > self._max_allocation:
            raise OutOfMemory(
                f"{size} bytes in one piece are needed, {self.info.name} allows {self._max_allocation}"
            )
        info = vk.VkMemoryAllocateInfo(allocationSize=size, memoryTypeIndex=kind.index)
        try:
            memory = _call("vkAllocateMemory", vk.vkAllocateMemory, self._device, info, None)
        except OutOfMemory as e:
            raise OutOfMemory(
                f"{self.info.name} has no {size} bytes left (of {total} asked for; its memory is "
                f"{kind.heap_bytes} bytes)"
            ) from e
        stack.callback(vk.vkFreeMemory, self._device, memory, None)
        return memory

    def _stage(self) -> _Placed:
        if self._staging is None:
            placed = self._place(self._staging_stack, {"": _STAGING}, self._plan.upload)
            self._staging = placed[""]
        return self._staging

    def _upload(self, target: _Placed, data: Array, offset: int) -> None:
        self._counters["bytes_uploaded"] += data.nbytes
        if target.mapped is not None:
            target.mapped[offset : offset + data.nbytes] = data
            return
        stage = self._stage()
        assert stage.mapped is not None
        for at in range(0, data.nbytes, _STAGING):
            part = data[at : at + _STAGING]
            stage.mapped[: part.nbytes] = part
            self._copy(stage.handle, 0, target.handle, offset + at, part.nbytes)

    def _download(self, source: _Placed, nbytes: int, offset: int) -> Array:
        self._counters["bytes_read_back"] += nbytes
        if source.mapped is not None:
            return source.mapped[offset : offset + nbytes].copy()
        stage = self._stage()
        assert stage.mapped is not None
        out = np.empty(nbytes, np.uint8)
        for at in range(0, nbytes, _STAGING):
            size = min(_STAGING, nbytes - at)
            self._copy(source.handle, offset + at, stage.handle, 0, size)
            out[at : at + size] = stage.mapped[:size]
        return out

    def _zero(self, target: _Placed) -> None:
        if target.mapped is not None:
            target.mapped[:] = 0
            return

        def fill(cmd: Any) -> None:
            vk.vkCmdFillBuffer(cmd, target.handle, 0, -(-target.nbytes // 4) * 4, 0)

        self._once(fill)

    def _copy(self, source: Any, at: int, target: Any, to: int, nbytes: int) -> None:
        def copy(cmd: Any) -> None:
            region = vk.VkBufferCopy(srcOffset=at, dstOffset=to, size=nbytes)
            vk.vkCmdCopyBuffer(cmd, source, target, 1, [region])

        self._once(copy)

    def _once(self, record: Callable[[Any], None]) -> None:
        """Records a transfer, submits it and waits."""
        cmd = self._copy_cmd
        transfer = vk.VK_PIPELINE_STAGE_TRANSFER_BIT
        begin = vk.VkCommandBufferBeginInfo(flags=vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)
        _call("vkBeginCommandBuffer", vk.vkBeginCommandBuffer, cmd, begin)
        _barrier(cmd, vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, transfer)
        record(cmd)
        _barrier(cmd, transfer, vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT)
        _barrier(cmd, transfer, vk.VK_PIPELINE_STAGE_HOST_BIT)
        _call("vkEndCommandBuffer", vk.vkEndCommandBuffer, cmd)
        commands = vk.ffi.new("VkCommandBuffer[]", [cmd])
        info = vk.VkSubmitInfo(commandBufferCount=1, pCommandBuffers=commands)
        self._submit(vk.ffi.new("VkSubmitInfo[]", [info]))

    # --- submissions

    def _submit(self, submits: Any) -> None:
        """One submission, waited for.

        Raises:
            DeviceLost: now or before; nothing more is submitted after it.
        """
        with self._lock:
            if self._lost:
                raise DeviceLost(self._lost)
            self._counters["submissions"] += 1
            if 0 < self.lose_at <= self._counters["submissions"]:
                self._lost = "the GPU was told to report loss"
                raise DeviceLost(self._lost)
            try:
                _call("vkResetFences", vk.vkResetFences, self._device, 1, self._fence)
                _call("vkQueueSubmit", vk.vkQueueSubmit, self._queue, 1, submits, self._fence[0])
                self._pending = True
                self._wait(self.deadline_s)
            except DeviceLost as e:
                self._lost = str(e)
                self._pending = False
                raise
            except TimeoutError as e:
                self._lost = f"the GPU did not finish a slice within {self.deadline_s:g} s"
                raise DeviceLost(self._lost) from e

    def _wait(self, seconds: float) -> None:
        timeout = int(seconds * 1e9)
        _call("vkWaitForFences", vk.vkWaitForFences, self._device, 1, self._fence, 1, timeout)
        self._pending = False

    def _release(self, stack: ExitStack) -> None:
        """Destroys handles, unless a hung submission may still use them: then the process has to end for it."""
        if self._pending:
            try:
                self._wait(min(self.deadline_s + 1.0, 5.0))
            except (TimeoutError, PvrError):
                stack.pop_all()
                return
        stack.close()


def _memory(pd: Any, info: DeviceInfo, force_staging: bool) -> tuple[MemoryPlan, int]:
    memory = vk.vkGetPhysicalDeviceMemoryProperties(pd)
    types = []
    for i in range(memory.memoryTypeCount):
        flags = memory.memoryTypes[i].propertyFlags
        types.append(
            MemoryType(
                index=i,
                device_local=bool(flags & vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT),
                visible=bool(flags & vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT),
                coherent=bool(flags & vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT),
                cached=bool(flags & vk.VK_MEMORY_PROPERTY_HOST_CACHED_BIT),
                heap_bytes=memory.memoryHeaps[memory.memoryTypes[i].heapIndex].size,
            )
        )
    return plan_memory(types, force_staging), int(info.properties["max_allocation"])
