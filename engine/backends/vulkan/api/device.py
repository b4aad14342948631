# SPDX-License-Identifier: Apache-2.0
"""A VkDevice with its queue: pipelines, descriptors, recordings, submissions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from engine.backends.base import DeviceInfo
from engine.backends.devices import NoDevice
from engine.backends.vulkan import features
from engine.backends.vulkan.api.binding import call, vk
from engine.backends.vulkan.api.commands import (
    Dispatch,
    Layout,
    barrier,
    dispatch,
    recording,
)
from engine.backends.vulkan.api.instance import compute_family, memory_types
from engine.backends.vulkan.api.memory import Memory, Placed
from engine.backends.vulkan.counters import Counter, Counters
from engine.backends.vulkan.draws import Draws, Target
from engine.backends.vulkan.imports import Importer
from engine.backends.vulkan.timer import Timer
from engine.errors import PvrError


class Device:
    """A VkDevice with one queue and one fence. All that it makes goes to the given stack, or to its
    own, `stack`, with which it is closed.
    """

    def __init__(self, instance: Any, pd: Any, info: DeviceInfo) -> None:
        self.info = info
        self._where = instance, pd
        family = compute_family(pd)
        if family is None:
            raise NoDevice("failed", f"{info.name} has no queue for compute")
        self._family = family
        self.low = False  # does its queue stand behind those of other processes?
        with ExitStack() as stack:
            dev = self._create(pd, family)
            stack.callback(vk.vkDestroyDevice, dev, None)
            self._dev = dev
            self.memory = Memory(dev, info)
            self._queue = vk.vkGetDeviceQueue(dev, family, 0)
            fence_info = vk.VkFenceCreateInfo()
            fence = call("vkCreateFence", vk.vkCreateFence, dev, fence_info, None)
            stack.callback(vk.vkDestroyFence, dev, fence, None)
            self._fence = vk.ffi.new("VkFence[]", [fence])
            info_ = vk.VkPipelineCacheCreateInfo()
            cache = call("vkCreatePipelineCache", vk.vkCreatePipelineCache, dev, info_, None)
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
        on = features.query(vk, call, pd, self.info.features)
        extension = features.priority_extension(vk, call, pd)
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
                dev = call("vkCreateDevice", vk.vkCreateDevice, pd, create, None)
            except PvrError:
                if more:
                    continue
                raise
            self.low = bool(more)
            return dev
        raise AssertionError

    @property
    def imports(self) -> Importer:
        """What makes other memory known to the device; `info.features` say what it can."""
        pd = self._where[1]
        return Importer(vk, call, pd, self._dev, memory_types(pd))

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
        sets = call(what, vk.vkCreateDescriptorSetLayout, dev, info, None)
        self.stack.callback(vk.vkDestroyDescriptorSetLayout, dev, sets, None)
        ranges = [vk.VkPushConstantRange(stageFlags=compute, offset=0, size=push_bytes)]
        layout_info = vk.VkPipelineLayoutCreateInfo(
            setLayoutCount=1,
            pSetLayouts=[sets],
            pushConstantRangeCount=1 if push_bytes else 0,
            pPushConstantRanges=ranges if push_bytes else None,
        )
        what = "vkCreatePipelineLayout"
        handle = call(what, vk.vkCreatePipelineLayout, dev, layout_info, None)
        self.stack.callback(vk.vkDestroyPipelineLayout, dev, handle, None)
        return Layout(handle, sets, count)

    def pipeline(self, name: str, code: bytes, layout: Layout) -> Any:
        """A pipeline from SPIR-V that lives as long as the device. Make them one at a time."""
        dev = self._dev
        module_info = vk.VkShaderModuleCreateInfo(codeSize=len(code), pCode=code)
        what = "vkCreateShaderModule"
        module = call(what, vk.vkCreateShaderModule, dev, module_info, None)
        try:
            entry_point = vk.ffi.new("char[]", b"main")
            stage = vk.VkPipelineShaderStageCreateInfo(
                stage=vk.VK_SHADER_STAGE_COMPUTE_BIT, module=module, pName=entry_point
            )
            info = vk.VkComputePipelineCreateInfo(stage=stage, layout=layout.handle)
            create = vk.vkCreateComputePipelines
            made = call(f"compiling {name}", create, dev, self._cache, 1, [info], None)
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
        pool = call(what, vk.vkCreateDescriptorPool, dev, pool_info, None)
        stack.callback(vk.vkDestroyDescriptorPool, dev, pool, None)
        layouts = [layout.sets for layout, _, _ in wanted]
        set_info = vk.VkDescriptorSetAllocateInfo(descriptorPool=pool, pSetLayouts=layouts)
        what = "vkAllocateDescriptorSets"
        sets = list(call(what, vk.vkAllocateDescriptorSets, dev, set_info))
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

    # --- command buffers, and what is recorded for one submission

    def commands(self, stack: ExitStack, count: int) -> list[Any]:
        """Command buffers of a pool of their own."""
        dev = self._dev
        pool_info = vk.VkCommandPoolCreateInfo(
            queueFamilyIndex=self._family,
            flags=vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
        )
        pool = call("vkCreateCommandPool", vk.vkCreateCommandPool, dev, pool_info, None)
        stack.callback(vk.vkDestroyCommandPool, dev, pool, None)
        info = vk.VkCommandBufferAllocateInfo(
            commandPool=pool,
            level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY,
            commandBufferCount=count,
        )
        return list(call("vkAllocateCommandBuffers", vk.vkAllocateCommandBuffers, dev, info))

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

            counters = Counters(vk, call, *self._where, self._dev, self._family)
            return counters.count(stack, (reset, counted), lambda cmd: dispatch(cmd, calls), submit)

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
                    barrier(cmd, transfer, transfer)
                vk.vkCmdCopyBuffer(cmd, source.handle, target.handle, 1, [region])

        return self._transfer(record, timed)

    def drawing(
        self,
        stack: ExitStack,
        shaders: tuple[bytes, bytes],
        target: Placed,
        pixels: Target | None = None,
    ) -> Callable[[int, bool], Any]:
        """Makes submissions of draws over `pixels` (none given: a row of floats), which are then
        copied to `target` and as many bytes; how many, and whether they wait for one another
        (Draws.record). Timed by the device's clock, if it has one; the queue has to draw
        (self.draws).
        """
        pixels = pixels or Target(target.nbytes // 4)
        draws = Draws(vk, call, stack, self._dev, shaders, pixels)

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
        compute = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT
        transfer, host = vk.VK_PIPELINE_STAGE_TRANSFER_BIT, vk.VK_PIPELINE_STAGE_HOST_BIT
        with recording(cmd, vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT):
            barrier(cmd, compute, transfer)
            record(cmd)
            barrier(cmd, transfer, compute)
            barrier(cmd, transfer, host)
        return self.submission([cmd], timed)

    # --- submitting

    def _make_timer(self, stack: ExitStack, pd: Any) -> Timer | None:
        families = vk.vkGetPhysicalDeviceQueueFamilyProperties(pd)
        if bits := families[self._family].timestampValidBits:
            period = vk.vkGetPhysicalDeviceProperties(pd).limits.timestampPeriod
            first, second = self.commands(stack, 2)
            return Timer(vk, call, stack, self._dev, (first, second), bits, period)
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
        call("vkResetFences", vk.vkResetFences, self._dev, 1, self._fence)
        fence = self._fence[0]
        call("vkQueueSubmit", vk.vkQueueSubmit, self._queue, 1, submission[0], fence)

    def wait(self, seconds: float) -> None:
        """Until the submission is done.

        Raises:
            TimeoutError, DeviceLost
        """
        timeout = int(seconds * 1e9)
        what = "vkWaitForFences"
        call(what, vk.vkWaitForFences, self._dev, 1, self._fence, 1, timeout)
