# SPDX-License-Identifier: Apache-2.0
"""What a device can do at best, measured: its copy and arithmetic rates, the cost of a start.

A GPU copies a buffer by its own command and runs a chain of multiply-adds, a shader that is put
together here since it belongs to no operation. A CPU copies arrays and multiplies matrices with
numpy, all threads at once.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

import kernels
from engine.backends.base import Backend, Executable, RunStats
from engine.program import Binding, Buffer, Call, Program
from kernels.contract import PARAM_WORDS

if TYPE_CHECKING:
    from engine.backends.vulkan.backend import VulkanBackend

COPY_BYTES = 64 << 20
CHAINS, UNROLL, LOOPS = 4, 4, 256  # vec4 each
FMA_OPERATIONS = LOOPS * CHAINS * UNROLL * 4 * 2  # of an invocation
_MOST_GROUPS = 65535
_DISPATCHES = 128


@dataclass(frozen=True)
class Rates:
    """Bytes (read and written) and operations a second; seconds of a dispatch in a recorded chain,
    and of a submission with one, its fence waited for. `clock`: timestamps or wall.
    """

    copy: float
    arithmetic: float
    arithmetic_by: str
    dispatch_s: float
    submission_s: float
    clock: str


def measure(backend: Backend, quick: bool = False) -> Rates:
    """All of it; a second or two.

    Raises:
        PvrError: the device fails.
    """
    budget = 0.15 if quick else 0.6
    if backend.info.kind == "cpu":
        threads = int(backend.info.properties.get("threads", 1))
        copy, arithmetic = _cpu_copy(threads, budget), _cpu_arithmetic(budget)
        by = "a float32 matrix product of numpy"
    else:
        from engine.backends.vulkan.backend import VulkanBackend

        assert isinstance(backend, VulkanBackend)
        copy, arithmetic = _gpu_copy(backend, budget), fma(backend, budget)[0]
        by = "a chain of float32 multiply-adds"
    dispatch, submission, clock = _starts(backend, budget)
    return Rates(copy, arithmetic, by, dispatch, submission, clock)


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


def _gpu_copy(backend: VulkanBackend, budget_s: float) -> float:
    nbytes = min(COPY_BYTES, backend.info.limits.max_storage_range)
    device = backend._device
    with ExitStack() as stack:
        made = backend._place(stack, {"from": nbytes, "to": nbytes}, "device")
        for placed in made.values():
            backend._zero(placed)

        def copy(times: int) -> float:
            submission = device.copying(made["from"], 0, made["to"], 0, nbytes, times)
            return _timed(lambda: backend._submit(submission, False))()

        once = _best(lambda: copy(1), budget_s / 4)
        times = max(2, min(64, int(0.02 / once)))
        many = _best(lambda: copy(times), budget_s)
        # What a submission costs by itself is in both.
        return 2 * nbytes * (times - 1) / max(many - once, many * 0.1)


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
        pipeline = device.pipeline("the probe", fma_shader(), layout)
        sets = device.descriptors(stack, params, [(layout, 0, [(target, 0, nbytes)])])
        while True:
            command = device.commands(stack, 1)[0]
            call = api.Dispatch(pipeline, layout, sets[0], b"", (groups, 1, 1), False)
            device.record(command, [call])
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


# --- the chain of multiply-adds as SPIR-V


class _Module:
    """Instructions in order, ids given out as they are wanted."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.bound = 1

    def id(self) -> int:
        self.bound += 1
        return self.bound - 1

    def put(self, opcode: int, *operands: int) -> None:
        self.words += [len(operands) + 1 << 16 | opcode, *operands]

    def make(self, opcode: int, kind: int, *operands: int) -> int:
        """An instruction with a type and a result."""
        out = self.id()
        self.put(opcode, kind, out, *operands)
        return out

    def type(self, opcode: int, *operands: int) -> int:
        out = self.id()
        self.put(opcode, out, *operands)
        return out

    def code(self) -> bytes:
        words = [0x07230203, 0x00010300, 0, self.bound, 0, *self.words]
        return struct.pack(f"<{len(words)}I", *words)


def _string(text: str) -> Sequence[int]:
    raw = text.encode() + b"\0"
    return struct.unpack(f"<{-(-len(raw) // 4)}I", raw.ljust(-(-len(raw) // 4) * 4, b"\0"))


def fma_shader() -> bytes:
    """SPIR-V 1.3: `a[i]` = the sum of CHAINS vec4 that began near it and were `x / 2 + 1` LOOPS *
    UNROLL times, which makes 2 of every number; workgroups of 32, binding 1.
    """
    m = _Module()
    ext, main, gid, array, block, buf = (m.id() for _ in range(6))
    m.put(17, 1)  # Capability Shader
    m.put(11, ext, *_string("GLSL.std.450"))
    m.put(14, 0, 1)  # MemoryModel Logical GLSL450
    m.put(15, 5, main, *_string("main"), gid)  # EntryPoint GLCompute
    m.put(16, main, 17, 32, 1, 1)  # LocalSize
    m.put(71, gid, 11, 28)  # BuiltIn GlobalInvocationId
    m.put(71, array, 6, 4)  # ArrayStride
    m.put(71, block, 2)  # Block
    m.put(72, block, 0, 35, 0)  # Offset
    m.put(71, buf, 34, 0)  # DescriptorSet
    m.put(71, buf, 33, 1)  # Binding
    void = m.type(19)
    function = m.type(33, void)
    boolean, uint, real = m.type(20), m.type(21, 32, 0), m.type(22, 32)
    vec4, uvec3 = m.type(23, real, 4), m.type(23, uint, 3)
    m.put(29, array, real)
    m.put(30, block, array)
    block_p, real_p, in_p = m.type(32, 12, block), m.type(32, 12, real), m.type(32, 1, uvec3)
    m.put(59, in_p, gid, 1)
    m.put(59, block_p, buf, 12)
    zero, one, loops = (m.make(43, uint, n) for n in (0, 1, LOOPS))

    def splat(value: float) -> int:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        scalar = m.make(43, real, bits)
        return m.make(44, vec4, *[scalar] * 4)

    half, unit = splat(0.5), splat(1.0)
    starts = [splat(float(i)) for i in range(CHAINS)]
    m.put(54, void, main, 0, function)
    entry, head, body, again, done = (m.id() for _ in range(5))
    m.put(248, entry)
    index = m.make(81, uint, m.make(61, uvec3, gid), 0)
    place = m.make(65, real_p, buf, zero, index)
    value = m.make(61, real, place)
    seed = m.make(80, vec4, *[value] * 4)
    begun = [m.make(129, vec4, seed, start) for start in starts]
    m.put(249, head)
    m.put(248, head)
    count, counted = m.id(), m.id()
    chains, ends = [m.id() for _ in range(CHAINS)], [m.id() for _ in range(CHAINS)]
    m.put(245, uint, count, zero, entry, counted, again)
    for chain, start, end in zip(chains, begun, ends, strict=True):
        m.put(245, vec4, chain, start, entry, end, again)
    more = m.make(176, boolean, count, loops)  # ULessThan
    m.put(246, done, again, 0)
    m.put(250, more, body, done)
    m.put(248, body)
    now = list(chains)
    for step in range(UNROLL):
        for i, x in enumerate(now):
            out = ends[i] if step == UNROLL - 1 else m.id()
            m.put(12, vec4, out, ext, 50, x, half, unit)  # Fma
            now[i] = out
    m.put(249, again)
    m.put(248, again)
    m.put(128, uint, counted, count, one)
    m.put(249, head)
    m.put(248, done)
    total = chains[0]
    for chain in chains[1:]:
        total = m.make(129, vec4, total, chain)
    result = m.make(81, real, total, 0)
    for lane in (1, 2, 3):
        result = m.make(129, real, result, m.make(81, real, total, lane))
    m.put(62, place, result)
    m.put(253)
    m.put(56)
    return m.code()
