# SPDX-License-Identifier: Apache-2.0
"""Hardware counters around a recording (VK_KHR_performance_query), for those who measure.

Of what a driver offers only the counters that speak of arithmetic or of memory are taken: what
bounds a kernel is said from the two together. The `vulkan` package's wrappers of these functions
lose their output, so that they are called as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from engine.errors import PvrError

_ARITHMETIC = re.compile(r"\b(alus?|fma|fpu|usc|eus?|shader cores?|instructions?)\b", re.I)
_MEMORY = re.compile(r"\b(memory|dram|external|bandwidth|gti|l[23]|bytes)\b", re.I)
_UNITS = (
    "", "percent", "ns", "bytes", "bytes/s", "K", "W", "V", "A", "Hz", "cycles",
)  # fmt: skip
_SUMS = ("", "ns", "bytes", "cycles")  # units of what adds up over calls
_STORAGE = ("int32", "int64", "uint32", "uint64", "float32", "float64")
_RENDER_PASS = 1  # the scope that a dispatch is not in
_PATIENCE_NS = 1_000_000_000  # for the lock: one process counts at a time


@dataclass(frozen=True)
class Counter:
    """One that is read. `about`: arithmetic or memory."""

    index: int
    name: str
    about: str
    unit: str
    storage: str

    @property
    def sums(self) -> bool:
        """Does it add up over calls, or is it a level?"""
        return self.unit in _SUMS


class Counters:
    """The counters of a device that was opened with them. `vk` and `call` are api's; `instance`,
    `pd`, `dev` and `family` those of the device.
    """

    def __init__(
        self, vk: Any, call: Callable[..., Any], instance: Any, pd: Any, dev: Any, family: int
    ) -> None:
        self._vk, self._call = vk, call
        self._instance, self._pd, self._dev, self._family = instance, pd, dev, family
        self.chosen = self._choose()

    def _function(self, name: str) -> Any:
        found = self._vk.lib.vkGetInstanceProcAddr(self._instance, name.encode())
        if not found:
            raise PvrError(f"the driver has no {name}")
        return self._vk.ffi.cast(f"PFN_{name}", found)

    def _checked(self, name: str, *args: Any) -> None:
        if status := self._function(name)(*args):
            raise PvrError(f"{name} failed with VkResult {status}")

    def _choose(self) -> list[Counter]:
        vk, count = self._vk, self._vk.ffi.new("uint32_t *")
        what = "vkEnumeratePhysicalDeviceQueueFamilyPerformanceQueryCountersKHR"
        null = vk.ffi.NULL
        self._checked(what, self._pd, self._family, count, null, null)
        counters = vk.ffi.new("VkPerformanceCounterKHR[]", count[0])
        words = vk.ffi.new("VkPerformanceCounterDescriptionKHR[]", count[0])
        for i in range(count[0]):
            counters[i].sType = vk.VK_STRUCTURE_TYPE_PERFORMANCE_COUNTER_KHR
            words[i].sType = vk.VK_STRUCTURE_TYPE_PERFORMANCE_COUNTER_DESCRIPTION_KHR
        self._checked(what, self._pd, self._family, count, counters, words)
        found = []
        for i in range(count[0]):
            name, said = (
                vk.ffi.string(text).decode("utf-8", "replace")
                for text in (words[i].name, words[i].description)
            )
            about = _about(name) or _about(said)
            if about and counters[i].scope != _RENDER_PASS:
                unit, storage = _UNITS[counters[i].unit], _STORAGE[counters[i].storage]
                found.append(Counter(i, name, about, unit, storage))
        return found

    def count(
        self,
        stack: ExitStack,
        commands: tuple[Any, Any],
        record: Callable[[Any], None],
        submit: Callable[[Any], None],
    ) -> dict[Counter, float]:
        """What the counters say of the commands that `record` puts into a command buffer. They run
        as often as the hardware needs to count all of it. `commands` are two empty command buffers,
        `submit` hands a VkSubmitInfo[] of one to the queue and waits for it.

        Raises:
            PvrError: another process counts, or the driver fails.
        """
        vk = self._vk
        if not self.chosen:
            return {}
        indices = [c.index for c in self.chosen]
        of = vk.VkQueryPoolPerformanceCreateInfoKHR(
            queueFamilyIndex=self._family, pCounterIndices=indices
        )
        info = vk.VkQueryPoolCreateInfo(
            pNext=of, queryType=vk.VK_QUERY_TYPE_PERFORMANCE_QUERY_KHR, queryCount=1
        )
        passes = vk.ffi.new("uint32_t *")
        needed = self._function("vkGetPhysicalDeviceQueueFamilyPerformanceQueryPassesKHR")
        needed(self._pd, vk.ffi.addressof(of), passes)
        pool = self._call("vkCreateQueryPool", vk.vkCreateQueryPool, self._dev, info, None)
        stack.callback(vk.vkDestroyQueryPool, self._dev, pool, None)
        with self._lock():
            self._record(commands, pool, record)
            for cmd, rounds in ((commands[0], range(1)), (commands[1], range(passes[0]))):
                for number in rounds:
                    which = vk.VkPerformanceQuerySubmitInfoKHR(counterPassIndex=number)
                    buffers = vk.ffi.new("VkCommandBuffer[]", [cmd])
                    one = vk.VkSubmitInfo(
                        pNext=which, commandBufferCount=1, pCommandBuffers=buffers
                    )
                    submit(vk.ffi.new("VkSubmitInfo[]", [one]))
            results = vk.ffi.new("VkPerformanceCounterResultKHR[]", len(indices))
            size = vk.ffi.sizeof(results)
            what, get = "vkGetQueryPoolResults", vk.vkGetQueryPoolResults
            self._call(what, get, self._dev, pool, 0, 1, size, results, size, 0)
        return {c: float(getattr(results[i], c.storage)) for i, c in enumerate(self.chosen)}

    @contextmanager
    def _lock(self) -> Iterator[None]:
        vk = self._vk
        info = vk.ffi.new("VkAcquireProfilingLockInfoKHR *")
        info.sType = vk.VK_STRUCTURE_TYPE_ACQUIRE_PROFILING_LOCK_INFO_KHR
        info.timeout = _PATIENCE_NS
        self._checked("vkAcquireProfilingLockKHR", self._dev, info)
        try:
            yield
        finally:
            self._function("vkReleaseProfilingLockKHR")(self._dev)

    def _record(self, commands: Sequence[Any], pool: Any, record: Callable[[Any], None]) -> None:
        """The reset has to be in a command buffer of its own; the query begins and ends the
        other one, which suits counters of every scope.
        """
        vk, call = self._vk, self._call
        reset, counted = commands
        begin = vk.VkCommandBufferBeginInfo()
        call("vkBeginCommandBuffer", vk.vkBeginCommandBuffer, reset, begin)
        vk.vkCmdResetQueryPool(reset, pool, 0, 1)
        call("vkEndCommandBuffer", vk.vkEndCommandBuffer, reset)
        call("vkBeginCommandBuffer", vk.vkBeginCommandBuffer, counted, begin)
        vk.vkCmdBeginQuery(counted, pool, 0, 0)
        record(counted)
        vk.vkCmdEndQuery(counted, pool, 0)
        call("vkEndCommandBuffer", vk.vkEndCommandBuffer, counted)


def _about(text: str) -> str:
    arithmetic, memory = _ARITHMETIC.search(text), _MEMORY.search(text)
    return "" if bool(arithmetic) == bool(memory) else "arithmetic" if arithmetic else "memory"
