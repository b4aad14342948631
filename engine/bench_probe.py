# SPDX-License-Identifier: Apache-2.0
"""What a device can do at best, measured: its copy and arithmetic rates, the cost of a start.

A GPU copies a buffer by its own command and by a kernel (the faster counts) and runs a chain of
multiply-adds. A CPU copies arrays and multiplies matrices with numpy, all threads at once.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

import kernels
from engine import bench_shaders
from engine.backends.base import Backend, Executable, RunStats
from engine.bench_shaders import FMA_OPERATIONS
from engine.errors import PvrError
from engine.program import Binding, Buffer, Call, Program
from kernels.contract import PARAM_WORDS

if TYPE_CHECKING:
    from engine.backends.vulkan.backend import VulkanBackend

COPY_BYTES = 64 << 20
LARGE_COPY_BYTES = 512 << 20  # on a GPU: several times its last cache
WARM_S, SUBMISSION_S = 0.05, 0.02  # of work before a copy counts; that a submission has of it
_COPY_STEP = bench_shaders.COPY_ROW * bench_shaders.COPY_GROUP * 16  # of a row of workgroups
_MOST_COPIES = 1024
_MOST_GROUPS = 65535
_DISPATCHES = 128
_ROW = 64  # invocations and pixels whose starts are compared


@dataclass(frozen=True)
class Starts:
    """Seconds that a dispatch over `width` invocations costs in a recorded chain, and a draw of one
    triangle over a target of `width` x 1 pixels of float32; `in_turn`: when each waits for the one
    before, as operations do whose results the next one needs.
    """

    width: int
    dispatch_s: float
    draw_s: float
    dispatch_in_turn_s: float
    draw_in_turn_s: float
    ratio: float  # of a draw to a dispatch
    ratio_in_turn: float


@dataclass(frozen=True)
class Rates:
    """Bytes (read and written) and operations a second; seconds of a dispatch in a recorded chain,
    and of a submission with one, its fence waited for. `clock`: timestamps or wall. `starts`: None
    where there is no queue that draws.
    """

    copy: float
    arithmetic: float
    arithmetic_by: str
    dispatch_s: float
    submission_s: float
    clock: str
    starts: Starts | None = None


def measure(backend: Backend, quick: bool = False) -> Rates:
    """All of it; a second or two.

    Raises:
        PvrError: the device fails.
    """
    budget = 0.15 if quick else 0.6
    if backend.info.kind == "cpu":
        threads = int(backend.info.properties.get("threads", 1))
        copy, arithmetic = _cpu_copy(threads, budget), _cpu_arithmetic(budget)
        by, starts = "a float32 matrix product of numpy", None
    else:
        from engine.backends.vulkan.backend import VulkanBackend

        assert isinstance(backend, VulkanBackend)
        copy, arithmetic = _gpu_copy(backend, budget), fma(backend, budget)[0]
        by, starts = "a chain of float32 multiply-adds", draws(backend, budget)
    dispatch, submission, clock = _starts(backend, budget)
    return Rates(copy, arithmetic, by, dispatch, submission, clock, starts)


def seconds(stats: RunStats) -> float:
    """By the device's clock where it has one."""
    return stats.wall_s if stats.device_s is None else stats.device_s


def repeat(run: Callable[[], float], budget_s: float, least: int = 3, most: int = 200) -> float:
    """The median of what `run` gives, after one call that does not count, for about `budget_s`."""
    return statistics.median(_runs(run, budget_s, least, most))


def _best(run: Callable[[], float], budget_s: float) -> float:
    """The least of it: a rate is what a device can do when nothing is in its way."""
    return min(_runs(run, budget_s))


def _runs(
    run: Callable[[], float], budget_s: float, least: int = 3, most: int = 200
) -> list[float]:
    run()
    end = time.perf_counter() + budget_s
    found: list[float] = []
    while len(found) < least or (time.perf_counter() < end and len(found) < most):
        found.append(run())
    return found


def _timed(function: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started

    return run


# --- the CPU


def _cpu_copy(threads: int, budget_s: float) -> float:
    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    cuts = np.linspace(0, COPY_BYTES, threads + 1).astype(int)
    parts = [slice(a, b) for a, b in pairwise(cuts)]
    with ThreadPoolExecutor(threads) as pool:  # numpy lets go of the interpreter to copy

        def copy(part: slice) -> None:
            np.copyto(target[part], source[part])

        return 2 * COPY_BYTES / _best(_timed(lambda: list(pool.map(copy, parts))), budget_s)


def _cpu_arithmetic(budget_s: float) -> float:
    side = 512
    a = np.random.default_rng(1).standard_normal((side, side)).astype(np.float32)
    out = np.empty_like(a)
    return 2 * side**3 / _best(_timed(lambda: np.matmul(a, a, out=out)), budget_s)


# --- the GPU


def rate(run: Callable[[int], float], nbytes: int, budget_s: float) -> float:
    """Bytes a second of copies that move `nbytes` each. `run` makes so many in one submission and
    tells the seconds that they took.

    Clocks rise only with work, and a submission costs something by itself: so there is work for
    WARM_S first, then as many copies at once as fill SUBMISSION_S, and the fastest counts.
    """
    times, worked = 1, 0.0
    while True:
        took, warm = max(run(times), 1e-9), worked >= WARM_S
        worked += took
        times = max(1, min(_MOST_COPIES, times * 8, math.ceil(times * SUBMISSION_S / took)))
        if warm:  # and so was the run that says how many
            break
    found = [run(times)]
    end = sum(found) + budget_s
    while len(found) < 3 or (sum(found) < end and len(found) < 50):
        found.append(run(times))
    return nbytes * times / max(min(found), 1e-9)


def _copy_nbytes(backend: VulkanBackend) -> int:
    """Bytes of a buffer to copy: more than any cache holds, where that leaves memory to others. A
    CPU in a GPU's place has no memory to spare, nor that large a cache.
    """
    limits, heap = backend.info.limits, backend._plan.device.heap_bytes
    most = COPY_BYTES if backend.info.software else LARGE_COPY_BYTES
    nbytes = min(most, limits.max_storage_range, heap // 8)
    return nbytes // _COPY_STEP * _COPY_STEP or _COPY_STEP


def _gpu_copy(backend: VulkanBackend, budget_s: float) -> float:
    """The faster of the copy command and a kernel that copies 16 bytes an invocation.

    Raises:
        PvrError: what the kernel copied is not what was there.
    """
    from engine.backends.vulkan import api

    nbytes, device = _copy_nbytes(backend), backend._device
    with ExitStack() as stack:
        made = backend._place(stack, {"from": nbytes, "to": nbytes}, "device")
        for placed in made.values():
            backend._zero(placed)
        mark = np.arange(64, dtype=np.uint32)
        backend._upload(made["from"], mark.view(np.uint8), nbytes - mark.nbytes)
        params = backend._place(stack, {"": 4 * PARAM_WORDS}, "upload")[""]
        layout = device.layout(2, 0)
        pipeline = device.pipeline("the probe", bench_shaders.copy_shader(), layout)
        bound = [(placed, 0, nbytes) for placed in made.values()]
        sets = device.descriptors(stack, params, [(layout, 0, bound)])
        command = device.commands(stack, 1)[0]
        rows = max(1, nbytes // _COPY_STEP)
        call = api.Dispatch(pipeline, layout, sets[0], b"", (bench_shaders.COPY_ROW, rows, 1), True)

        def timed(submission: object) -> float:
            wall = _timed(lambda: backend._submit(submission, False))()
            found = device.timer.elapsed() if device.timer else None
            return wall if found is None else found

        def dispatching(times: int) -> float:
            api.record(command, [call] * times)
            return timed(device.submission([command], timed=True))

        def commanding(times: int) -> float:
            return timed(device.copying(made["from"], 0, made["to"], 0, nbytes, times, True))

        best = rate(dispatching, 2 * nbytes, budget_s / 2)
        copied = backend._download(made["to"], mark.nbytes, nbytes - mark.nbytes)
        if not np.array_equal(copied.view(np.uint32), mark):
            raise PvrError(f"{backend.info.name} has copied something else")
        return max(best, rate(commanding, 2 * nbytes, budget_s / 2))


def fma(backend: VulkanBackend, budget_s: float) -> tuple[float, float]:
    """Operations a second in chains of multiply-adds, and the number that an invocation found."""
    from engine.backends.vulkan import api

    device = backend._device
    groups = 64
    with ExitStack() as stack:
        nbytes = 4 * 32 * _MOST_GROUPS
        target = backend._place(stack, {"": nbytes}, "device")[""]
        params = backend._place(stack, {"": 4 * PARAM_WORDS}, "upload")[""]
        backend._zero(target)
        layout = device.layout(1, 0)
        pipeline = device.pipeline("the probe", bench_shaders.fma_shader(), layout)
        sets = device.descriptors(stack, params, [(layout, 0, [(target, 0, nbytes)])])
        while True:
            command = device.commands(stack, 1)[0]
            call = api.Dispatch(pipeline, layout, sets[0], b"", (groups, 1, 1), False)
            api.record(command, [call])
            submission = device.submission([command], timed=True)

            def run(submission: object = submission) -> float:
                wall = _timed(lambda: backend._submit(submission, False))()
                found = device.timer.elapsed() if device.timer else None
                return wall if found is None else found

            took = _best(run, budget_s / 4)
            if took > 0.01 or groups == _MOST_GROUPS:
                break
            groups = min(_MOST_GROUPS, groups * max(2, int(0.02 / max(took, 1e-6))))
        value = float(backend._download(target, 4, 0).view(np.float32)[0])
    return FMA_OPERATIONS * 32 * groups / took, value


# --- the cost of a start


def _starts(backend: Backend, budget_s: float) -> tuple[float, float, str]:
    """Seconds of a dispatch in a chain, of a submission with one dispatch, and the clock."""
    contract, k = kernels.op("rmsnorm"), 32
    push = {"k": k, "eps": 1e-5, "last": 0, "add": 0}
    variant = contract.variants[0]
    names = [b.name for b in contract.bindings]
    buffers = {n: Buffer(n, 4 * k, "state") for n in names}
    buffers["params"] = Buffer("params", 4 * PARAM_WORDS, "params")
    groups = contract.groups({**push, "tokens": 1}, variant)
    bindings = tuple(Binding(n) for n in names)
    call = Call("rmsnorm", variant.name, bindings, contract.pack(**push), groups)
    sequences = {"one": (call,), "many": (call,) * (_DISPATCHES + 1)}
    weights = backend.weights({})
    exe: Executable = backend.executable(Program(buffers, sequences), weights)
    try:
        exe.write("params", np.array([1], np.uint32))
        clock = "wall" if exe.run("one").device_s is None else "timestamps"
        one = _best(lambda: seconds(exe.run("one")), budget_s / 2)
        many = _best(lambda: seconds(exe.run("many")), budget_s / 2)
        submission = repeat(lambda: exe.run("one").wall_s, budget_s / 2)
    finally:
        exe.close()
        weights.close()
    return max(many - one, 0.0) / _DISPATCHES, submission, clock


def draws(backend: VulkanBackend, budget_s: float) -> Starts | None:
    """A dispatch beside a draw; None where the device's queue draws nothing.

    Raises:
        PvrError: one of the two gave something else than the numbers from 0 up.
    """
    from engine.backends.vulkan import api

    device = backend._device
    if not device.draws:
        return None
    if backend.info.software:
        # Once something was drawn, lavapipe's timestamps leave out what is dispatched.
        device.timer = None
    with ExitStack() as stack:
        nbytes = 4 * _ROW
        made = backend._place(stack, {"computed": nbytes, "drawn": nbytes}, "device")
        params = backend._place(stack, {"": 4 * PARAM_WORDS}, "upload")[""]
        layout = device.layout(1, 0)
        pipeline = device.pipeline("the probe", bench_shaders.index_shader(), layout)
        sets = device.descriptors(stack, params, [(layout, 0, [(made["computed"], 0, nbytes)])])
        command = device.commands(stack, 1)[0]
        shaders = bench_shaders.triangle_shader(), bench_shaders.column_shader()
        drawing = device.drawing(stack, shaders, made["drawn"])

        def dispatching(count: int, in_turn: bool) -> object:
            call = api.Dispatch(pipeline, layout, sets[0], b"", (_ROW // 32, 1, 1), in_turn)
            api.record(command, [call] * count)
            return device.submission([command], timed=True)

        def cost(submission: Callable[[int, bool], object], in_turn: bool) -> float:
            def took(count: int) -> float:
                ready = submission(count, in_turn)
                wall = _timed(lambda: backend._submit(ready, False))()
                found = device.timer.elapsed() if device.timer else None
                return wall if found is None else found

            one, many = (_best(partial(took, n), budget_s / 8) for n in (1, _DISPATCHES + 1))
            return max(many - one, 0.0) / _DISPATCHES

        found = [cost(s, turn) for turn in (False, True) for s in (dispatching, drawing)]
        for name, placed in made.items():
            row = backend._download(placed, nbytes, 0).view(np.float32)
            if not np.array_equal(row, np.arange(_ROW)):
                raise PvrError(f"{backend.info.name} has {name} a wrong row of pixels")
    ratios = [draw / dispatch if dispatch else 0.0 for dispatch, draw in (found[:2], found[2:])]
    return Starts(_ROW, *found, *ratios)
