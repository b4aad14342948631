# SPDX-License-Identifier: Apache-2.0
"""Hardware counters, of a driver that is played here: no software device has any."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vulkan import VulkanBackend, api
from engine.backends.vulkan.counters import Counter, Counters
from engine.errors import PvrError

vk: Any = api.vk
pytestmark = pytest.mark.gpu  # the bindings need the loader

# name, description, unit, scope, storage, value
OFFERED = (
    ("Clock", "GPU core clocks", "CYCLES", "COMMAND_BUFFER", "UINT64", 7),
    ("ALU busy", "of all cycles", "PERCENTAGE", "COMMAND", "FLOAT32", 62.5),
    ("Reads", "Bytes read from external memory", "BYTES", "COMMAND", "UINT64", 1 << 40),
    ("DRAM", "busy", "PERCENTAGE", "COMMAND_BUFFER", "FLOAT64", 20.25),
    ("Texture memory", "", "BYTES", "RENDER_PASS", "UINT32", 1),
    ("ALU memory operations", "both", "GENERIC", "COMMAND", "INT32", 1),
)
WANTED = [
    Counter(1, "ALU busy", "arithmetic", "percent", "float32"),
    Counter(2, "Reads", "memory", "bytes", "uint64"),
    Counter(3, "DRAM", "memory", "percent", "float64"),
]


class Driver:
    """Answers in C's own types, as a driver does; `said` is what it was told to do."""

    def __init__(self, passes: int = 2, locked: bool = False) -> None:
        self.said: list[str] = []
        self.functions = {
            f"vkEnumeratePhysicalDevice{QUEUE}CountersKHR": self.enumerate,
            f"vkGetPhysicalDevice{QUEUE}PassesKHR": self.count_passes,
            "vkAcquireProfilingLockKHR": lambda dev, info: self.say("lock", 2 if locked else 0),
            "vkReleaseProfilingLockKHR": lambda dev: self.say("unlock", None),
        }
        self.passes = passes
        self.pointers: list[Any] = []
        self.vk = SimpleNamespace(**vars(vk))
        self.vk.lib = SimpleNamespace(vkGetInstanceProcAddr=self.address)
        self.vk.vkCreateQueryPool = self.create
        self.vk.vkGetQueryPoolResults = self.results
        for name in (
            "vkDestroyQueryPool", "vkCmdResetQueryPool", "vkCmdBeginQuery", "vkCmdEndQuery",
            "vkBeginCommandBuffer", "vkEndCommandBuffer",
        ):  # fmt: skip
            setattr(self.vk, name, lambda *args, name=name: self.say(name.removeprefix("vk"), None))

    def say(self, what: str, answer: Any) -> Any:
        self.said.append(what)
        return answer

    def address(self, instance: Any, name: bytes) -> Any:
        function = self.functions.get(name.decode())
        if function is None:
            return vk.ffi.NULL
        self.pointers.append(vk.ffi.callback(vk.ffi.typeof(f"PFN_{name.decode()}"), function))
        return self.pointers[-1]

    def enumerate(self, pd: Any, family: int, count: Any, counters: Any, words: Any) -> int:
        assert family == 3
        count[0] = len(OFFERED)
        if counters:
            for i, (name, said, unit, scope, storage, _) in enumerate(OFFERED):
                counters[i].unit = getattr(vk, f"VK_PERFORMANCE_COUNTER_UNIT_{unit}_KHR")
                counters[i].scope = getattr(vk, f"VK_PERFORMANCE_COUNTER_SCOPE_{scope}_KHR")
                counters[i].storage = getattr(vk, f"VK_PERFORMANCE_COUNTER_STORAGE_{storage}_KHR")
                words[i].name, words[i].description = name.encode(), said.encode()
        return 0

    def count_passes(self, pd: Any, info: Any, passes: Any) -> None:
        assert list(info.pCounterIndices[0 : info.counterIndexCount]) == [1, 2, 3]
        passes[0] = self.passes

    def create(self, dev: Any, info: Any, allocator: Any) -> str:
        assert info.queryType == vk.VK_QUERY_TYPE_PERFORMANCE_QUERY_KHR
        return self.say("pool", "a pool")

    def results(
        self, dev: Any, pool: Any, at: int, n: int, size: int, out: Any, *rest: int
    ) -> None:
        assert size == 8 * len(WANTED)
        for i, counter in enumerate(WANTED):
            setattr(out[i], counter.storage, OFFERED[counter.index][-1])

    def counters(self) -> Counters:
        null = vk.ffi.NULL
        return Counters(self.vk, lambda what, f, *args: f(*args), null, null, null, 3)

    def count(self) -> dict[Counter, float]:
        def submit(submission: Any) -> None:
            which = vk.ffi.cast("VkPerformanceQuerySubmitInfoKHR *", submission[0].pNext)
            self.say(f"submit {which.counterPassIndex}", None)

        null = vk.ffi.NULL
        with ExitStack() as stack:
            record = lambda cmd: self.say("calls", None)  # noqa: E731
            return self.counters().count(stack, (null, null), record, submit)


QUEUE = "QueueFamilyPerformanceQuery"


def test_counters_that_speak_of_arithmetic_or_memory_are_taken() -> None:
    assert Driver().counters().chosen == WANTED
    assert [c.sums for c in WANTED] == [False, True, False]


def test_the_calls_run_once_for_each_pass() -> None:
    driver = Driver(passes=2)
    found = driver.count()
    assert found == dict(zip(WANTED, (62.5, float(1 << 40), 20.25), strict=True))
    recorded = ["BeginCommandBuffer", "CmdResetQueryPool", "EndCommandBuffer"]
    recorded += ["BeginCommandBuffer", "CmdBeginQuery", "calls", "CmdEndQuery", "EndCommandBuffer"]
    runs = ["submit 0", "submit 0", "submit 1"]  # the reset, then the passes
    assert driver.said == ["pool", "lock", *recorded, *runs, "unlock", "DestroyQueryPool"]


def test_another_process_counts() -> None:
    driver = Driver(locked=True)
    with pytest.raises(PvrError, match="vkAcquireProfilingLockKHR failed with VkResult 2"):
        driver.count()
    assert driver.said[-1] == "DestroyQueryPool"


def test_a_driver_without_the_functions_it_promised() -> None:
    driver = Driver()
    driver.functions.clear()
    with pytest.raises(PvrError, match="the driver has no vkEnumerate"):
        driver.counters()


def test_a_device_without_counters_gives_none() -> None:
    backend = VulkanBackend(allow_software=True)
    try:
        if "counters" not in backend.info.features:
            assert backend._device.count([], 1.0) == {}
    finally:
        backend.close()
