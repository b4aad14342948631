# SPDX-License-Identifier: Apache-2.0
"""Times the kernels on a device and says what bounds each.

    python -m engine.bench kernels [--device cpu|gpu] [--allow-software] [--op OP] [--quick]
        [--json]

Exit status 0: done; 1: no such device, or it failed; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import kernels
from engine import bench_probe
from engine.backends.base import Array, Backend
from engine.backends.cpu import CpuBackend
from engine.backends.devices import NoDevice
from engine.bench_cases import Case, cases, operations
from engine.bench_probe import Rates, Starts
from engine.errors import DeviceLost, PvrError
from engine.program import Binding, Buffer, Call, Program
from kernels.contract import PARAM_WORDS

OK, FAILED, USAGE = 0, 1, 2
NEAR = 0.2  # a share of a rate below which that rate can hardly be what bounds a kernel
_MOST_CALLS = 128  # of a recorded chain


_ESTIMATES = ("bytes", "operations", "copy_share", "arithmetic_share", "bound")


@dataclass(frozen=True)
class Reading:
    """A hardware counter, of one call where it adds up. `about`: arithmetic or memory."""

    name: str
    about: str
    unit: str
    value: float


@dataclass(frozen=True)
class Row:
    """What one call costs. `seconds` is measured, by timestamps or the wall clock; `bytes` and
    `operations`, and so the shares of the measured rates, are estimates from the shapes. `bound` is
    one, too, unless the device's own counters say how busy both sides are.
    """

    op: str
    variant: str
    shape: str
    seconds: float = 0.0
    bytes: int = 0
    operations: int = 0
    copy_share: float = 0.0
    arithmetic_share: float = 0.0
    bound: str = ""
    error: str = ""
    counters: list[Reading] = field(default_factory=list)
    estimates: list[str] = field(default_factory=lambda: list(_ESTIMATES))


def bound(seconds: float, copy_share: float, arithmetic_share: float, dispatch_s: float) -> str:
    """What bounds a call, always from both shares and the cost of a dispatch: `launch` when half of
    the time is that of starting anything at all, else the greater share; `latency` when both are
    small: waiting, too few invocations, or instructions that are no arithmetic.
    """
    if seconds <= 2 * dispatch_s:
        return "launch"
    if max(copy_share, arithmetic_share) < NEAR:
        return "latency"
    return "memory" if copy_share >= arithmetic_share else "arithmetic"


def time_case(backend: Backend, case: Case, rates: Rates, quick: bool = False) -> Row:
    """Runs a call again and again in a recorded chain, in which each sees the one before.

    Calls take another part of a large buffer for the binding that is another one in real work (a
    model's weights), so that a cache does not answer for memory.

    Raises:
        DeviceLost: nothing more can be measured.
    """
    at_best = max(
        case.nbytes / rates.copy, case.operations / rates.arithmetic, rates.dispatch_s, 1e-6
    )
    count = max(1, min(_MOST_CALLS, int((0.004 if quick else 0.02) / at_best)))
    try:
        exe, close = _record(backend, case, count, (16 if quick else 64) << 20)
        try:
            budget = 0.05 if quick else 0.4
            took = bench_probe.repeat(
                lambda: bench_probe.seconds(exe.run("chain")), budget, least=2, most=50
            )
            readings = _count(backend, exe, count)
        finally:
            close()
    except DeviceLost as e:
        if backend.info.kind == "gpu" and not getattr(backend, "doubt", lambda *_: "")(
            case.op, case.variant.name
        ):
            raise
        return Row(case.op, case.name, case.shape, error=str(e))
    except PvrError as e:
        return Row(case.op, case.name, case.shape, error=str(e))
    each = took / count
    copy, arithmetic = case.nbytes / each / rates.copy, case.operations / each / rates.arithmetic
    word, busy = bound(each, copy, arithmetic, rates.dispatch_s), levels(readings)
    if busy is not None:
        word = bound(each, *busy, rates.dispatch_s)
    return Row(
        case.op,
        case.name,
        case.shape,
        each,
        case.nbytes,
        case.operations,
        copy,
        arithmetic,
        word,
        counters=readings,
        estimates=[e for e in _ESTIMATES if e != "bound" or busy is None],
    )


def _count(backend: Backend, exe: Any, calls: int) -> list[Reading]:
    """The hardware's counters over the chain; none on a CPU and where the driver has none."""
    device = getattr(backend, "_device", None)
    if device is None:
        return []
    found = device.count(exe._dispatches["chain"], getattr(backend, "deadline_s", 0.0))
    return [
        Reading(c.name, c.about, c.unit, value / calls if c.sums else value)
        for c, value in found.items()
    ]


def levels(readings: Sequence[Reading]) -> tuple[float, float] | None:
    """How busy memory and arithmetic are (0 to 1), by the busiest counter of each; None unless both
    are counted.
    """
    found = []
    for about in ("memory", "arithmetic"):
        some = [r.value for r in readings if r.about == about and r.unit == "percent"]
        if not some:
            return None
        found.append(max(some) / 100)
    return found[0], found[1]


def _record(backend: Backend, case: Case, count: int, cold_bytes: int) -> Any:
    contract = kernels.op(case.op)
    sizes = {name: -(-nbytes // 256) * 256 for name, nbytes in case.sizes.items()}
    copies = 1
    if case.cold:
        copies = max(1, min(count, cold_bytes // sizes[case.cold]))
    buffers = {
        name: Buffer(name, size * (copies if name == case.cold else 1), "state")
        for name, size in sizes.items()
    }
    buffers["params"] = Buffer("params", 4 * PARAM_WORDS, "params")
    most = backend.info.limits.max_workgroup_count
    groups = contract.groups({**case.push, "tokens": case.tokens, "most": most}, case.variant)
    push = contract.pack(**case.push)
    calls = []
    for i in range(count):
        bindings = []
        for b in contract.bindings:
            offset = sizes[b.name] * (i % copies) if b.name == case.cold else 0
            bindings.append(Binding(b.name, offset, case.sizes[b.name]))
        calls.append(Call(case.op, case.variant.name, tuple(bindings), push, groups))
    weights = backend.weights({})
    try:
        exe = backend.executable(Program(buffers, {"chain": tuple(calls)}), weights)
    except BaseException:
        weights.close()
        raise

    def close() -> None:
        exe.close()
        weights.close()

    words = np.zeros(PARAM_WORDS, np.uint32)
    words[: len(case.params)] = case.params
    try:
        exe.write("params", words)
        for name, data in case.data.items():
            for i in range(copies if name == case.cold else 1):
                exe.write(name, _filled(data, case.sizes[name]), i * sizes[name])
    except BaseException:
        close()
        raise
    return exe, close


def _filled(data: Array, nbytes: int) -> Array:
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.tile(raw, -(-nbytes // raw.nbytes))[:nbytes]


def rows(backend: Backend, rates: Rates, op: str = "", quick: bool = False) -> Iterator[Row]:
    """A Row for each call, as they are measured."""
    for case in cases(backend, op, quick):
        yield time_case(backend, case, rates, quick)


# --- the program


def open_device(kind: str, allow_software: bool) -> Backend:
    """The CPU, or the GPU that the daemon would take.

    Raises:
        NoDevice
    """
    if kind == "cpu":
        return CpuBackend()
    from engine.backends.vulkan.backend import VulkanBackend

    return VulkanBackend(allow_software=allow_software)


_HEAD = f"{'operation.variant':<30} {'shape':<22} {'time':>9} {'MB':>8} {'of copy':>8}" + (
    f" {'MFLOP':>8} {'of arith':>8}  bound by"
)


def _line(row: Row) -> str:
    name = f"{row.op}.{row.variant}"
    if row.error:
        return f"{name:<30} {row.shape:<22} {row.error}"
    return (
        f"{name:<30} {row.shape:<22} {_time(row.seconds):>9} {row.bytes / 1e6:>8.3f}"
        f" {row.copy_share:>8.1%} {row.operations / 1e6:>8.2f} {row.arithmetic_share:>8.1%}"
        f"  {row.bound}"
        + "".join(f"\n  {r.name} ({r.about}): {r.value:.6g} {r.unit}" for r in row.counters)
    )


def _time(seconds: float) -> str:
    if seconds < 1e-6:
        return f"{seconds * 1e9:.0f} ns"
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-2 else f"{seconds * 1e3:.1f} ms"


def _intro(backend: Backend, rates: Rates) -> str:
    info = backend.info
    soft = ", a software device" if info.kind == "gpu" and info.software else ""
    clock = {"timestamps": "the device's timestamps", "wall": "the wall clock"}[rates.clock]
    return (
        f"{info.name} ({info.driver}{soft})\n"
        f"Measured: copy {rates.copy / 1e9:.1f} GB/s read and written; arithmetic"
        f" {rates.arithmetic / 1e9:.1f} GFLOP/s by {rates.arithmetic_by}.\n"
        f"A dispatch in a recorded chain costs {_time(rates.dispatch_s)},"
        f" {'a call of the library' if info.kind == 'cpu' else 'a submission with its fence'}"
        f" {_time(rates.submission_s)}.\n"
        f"{_starts(rates.starts)}"
        f"{_counters(backend)}"
        f"Time is measured by {clock}; MB, MFLOP and shares are estimates from the shapes, and what"
        " bounds a call is said from both shares together. A share is above 100% where a cache"
        " answers, or where int8 arithmetic is faster than float32.\n"
    )


def _counters(backend: Backend) -> str:
    if backend.info.kind == "cpu":
        return ""
    if "counters" in backend.info.features:
        return "Below a call stand the hardware's own counters of it.\n"
    return "The driver has no hardware counters (VK_KHR_performance_query).\n"


def _starts(starts: Starts | None) -> str:
    if starts is None:
        return ""
    return (
        f"To start {starts.width} invocations costs {_time(starts.dispatch_s)} as a dispatch,"
        f" {_time(starts.draw_s)} as a draw to {starts.width}x1 pixels ({starts.ratio:.2f} of it);"
        f" where each waits for the one before, {_time(starts.dispatch_in_turn_s)} and"
        f" {_time(starts.draw_in_turn_s)} ({starts.ratio_in_turn:.2f}).\n"
    )


def _device(backend: Backend) -> dict[str, Any]:
    info = backend.info
    return {
        "kind": info.kind,
        "name": info.name,
        "driver": info.driver,
        "software": info.software,
        "features": sorted(info.features),
    }


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine.bench", allow_abbrev=False)
    parser.add_argument("what", choices=["kernels"])
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--allow-software", action="store_true")
    parser.add_argument("--op", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.op and args.op not in (known := operations()):
        parser.error(f"There is no operation {args.op!r}; there are {', '.join(known)}.")
    return args


def main(argv: Sequence[str]) -> int:
    """The command line above."""
    try:
        args = _arguments(argv)
        with contextlib.closing(open_device(args.device, args.allow_software)) as backend:
            rates = bench_probe.measure(backend, args.quick)
            if args.json:
                found = [asdict(r) for r in rows(backend, rates, args.op, args.quick)]
                whole = {"device": _device(backend), "rates": asdict(rates), "kernels": found}
                print(json.dumps(whole, ensure_ascii=False))
                return OK
            print(f"{_intro(backend, rates)}\n{_HEAD}", flush=True)
            for row in rows(backend, rates, args.op, args.quick):
                print(_line(row), flush=True)
    except NoDevice as e:
        hint = " (--allow-software takes it)" if e.code == "software_only" else ""
        print(f"There is no such device: {e}{hint}.", file=sys.stderr)
        return FAILED
    except (PvrError, FileNotFoundError) as e:
        print(e, file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    return OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
