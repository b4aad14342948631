# SPDX-License-Identifier: Apache-2.0
"""Kernels of a GPU with and without one thing, all else alike (also a part of text_ablation).

Each row is the time of a call in a recorded chain in which each call waits for the one before:
`ours` with the thing, the "peer" without it, run in turn.

- tiles on chip: `matmul` through tiles in shared memory, against the variant that keeps four rows
  and four tokens in registers alone.
- rows in sixteens: a product whose matrix lies in tiles of 16 rows, against one that reads rows one
  by one (shaders/layout.comp).
- subgroups: `matvec` whose sums meet by subgroup operations, against shared memory alone.
- as a draw: the choice of experts as a fragment shader whose target is copied to where the next
  operation reads it (shaders/route.frag), against the faster variant of the kernel `route`. Where a
  draw takes at most TAKEN of the kernel's time it would be worth to have it in the engine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

import kernels
from benchmarks import common, shaders
from engine import bench, bench_cases, bench_probe, bench_shaders
from engine.backends.base import Array
from kernels import weights
from kernels.contract import PARAM_WORDS, Variant

if TYPE_CHECKING:
    from engine.backends.vulkan.backend import VulkanBackend

TAKEN = 0.95
FORMS = {"f16": "f16", "q8": "int8"}
CHAIN = 16
EXPERTS, USED = 64, 8  # olmoe's

Timed = Callable[[], float]


def rows(backend: VulkanBackend, repeats: int, quick: bool) -> Iterator[common.Row]:
    """All that the device can have."""
    rates = bench_probe.measure(backend, quick=True)
    for fmt, name in FORMS.items():
        for thing, op, has, lacks in (
            ("tiles on chip", "matmul", f"{fmt}_wide", fmt),
            ("subgroups", "matvec", f"{fmt}_wide_sub", f"{fmt}_wide"),
        ):
            found = {
                case.name: case
                for case in bench_cases.cases(backend, op, quick=True)
                if case.name in (has, lacks) and case.shape.startswith("gate_up")
            }
            title = f"{name} {op} without {thing}"
            if len(found) < 2:
                print(f"{title}: the device has no such kernels.", file=sys.stderr)
                continue

            def timed(which: str, cases: dict[str, bench_cases.Case] = found) -> float:
                row = bench.time_case(backend, cases[which], rates, quick=True)
                if row.error:
                    raise SystemExit(f"{which}: {row.error}")
                return row.seconds

            yield _row(title, lambda h=has: timed(h), lambda w=lacks: timed(w), repeats)  # type: ignore[misc]
        with ExitStack() as stack:
            tiles = _layout(backend, stack, fmt, True, quick)
            plain = _layout(backend, stack, fmt, False, quick)
            yield _row(f"{name} matvec without rows in sixteens", tiles, plain, repeats)
    if backend._device.draws:
        for tokens in (1, 128):
            yield from _choice(backend, tokens, repeats)


def _row(title: str, ours: Timed, without: Timed, repeats: int) -> common.Row:
    for run in (ours, without):
        run()
    a, b = (1e6 * statistics.median(x) for x in common.interleaved(ours, without, repeats))
    return common.row(title, "us", a, b, "without")


def _plain(fmt: str, w: Array) -> Array:
    """A matrix as shaders/layout.comp reads it row by row."""
    if fmt == "f16":
        return w.astype(np.float16).reshape(-1).view(np.uint8)
    n, k = w.shape
    blocks = w.reshape(n, k // 32, 32)
    scale = (np.abs(blocks).max(axis=2) / 127).astype(np.float16)
    q = np.rint(blocks / scale[:, :, None].astype(np.float32)).clip(-127, 127).astype(np.int8)
    quads = scale.reshape(n // 4, 4, k // 32).transpose(0, 2, 1)  # four rows of a block together
    words = np.zeros((n // 4, k // 32, 4, 2), np.float16)
    words[..., 0] = quads
    return np.concatenate([words.reshape(-1).view(np.uint8), q.reshape(-1).view(np.uint8)])


def _layout(
    backend: VulkanBackend, stack: ExitStack, fmt: str, sixteen: bool, quick: bool
) -> Timed:
    """Seconds of a product, each with the next of some matrices; checked once.

    Raises:
        SystemExit: it gives something else than numpy.
    """
    from engine.backends.vulkan import api

    n, k = (512, 2048) if quick or backend.info.software else (4096, 4096)
    copies = 2 if backend.info.software else 8  # together more than caches hold
    device = backend._device
    rng = np.random.default_rng(1)
    w = rng.standard_normal((n, k), np.float32)
    x = rng.standard_normal(k, np.float32)
    packed = weights.pack(fmt, w).reshape(-1).view(np.uint8) if sixteen else _plain(fmt, w)
    sizes = {"w": copies * packed.nbytes, "x": 4 * k, "y": 4 * n}
    made = backend._place(stack, sizes, "device")
    for i in range(copies):
        backend._upload(made["w"], packed, i * packed.nbytes)
    backend._upload(made["x"], x.view(np.uint8), 0)
    params = backend._place(stack, {"": 4 * PARAM_WORDS}, "upload")[""]
    layout = device.layout(3, 0)
    defines = {"N": n, "K": k, **({"SIXTEEN": 1} if sixteen else {})}
    code = shaders.compiled("layout.comp", {**defines, **({"INT8": 1} if fmt == "q8" else {})})
    pipeline = device.pipeline("a benchmark", code, layout)
    wanted = [
        (layout, 0, [(made["w"], i * packed.nbytes, packed.nbytes), (made["x"], 0, 4 * k),
                     (made["y"], 0, 4 * n)])
        for i in range(copies)
    ]  # fmt: skip
    sets = device.descriptors(stack, params, wanted)
    command = device.commands(stack, 1)[0]
    calls = [
        api.Dispatch(pipeline, layout, sets[i % copies], b"", (n // 16, 1, 1), True)
        for i in range(CHAIN)
    ]
    api.record(command, calls)
    submission = device.submission([command], timed=True)

    def run() -> float:
        return _seconds(backend, submission) / CHAIN

    run()
    got = backend._download(made["y"], 4 * n, 0).view(np.float32)
    error = np.abs(got - weights.unpack(fmt, weights.pack(fmt, w), n, k) @ x).max()
    if not error < 0.05 * k**0.5:
        raise SystemExit(f"layout.comp {defines} is off by {error}")
    return run


def _seconds(backend: VulkanBackend, submission: object) -> float:
    began = time.perf_counter()
    backend._submit(submission, False)
    took = time.perf_counter() - began
    found = backend._device.timer.elapsed() if backend._device.timer else None
    return took if found is None else found


def _choice(backend: VulkanBackend, tokens: int, repeats: int) -> Iterator[common.Row]:
    """The choice of experts as a dispatch and as a draw.

    Raises:
        SystemExit: they choose differently.
    """
    from engine.backends.vulkan import api
    from engine.backends.vulkan.draws import Target

    device = backend._device
    contract = kernels.op("route")
    logits = np.random.default_rng(2).standard_normal((tokens, EXPERTS)).astype(np.float32)
    push = {"experts": EXPERTS, "used": USED, "norm": 0}
    nbytes = 8 * tokens * USED
    with ExitStack() as stack:
        made = backend._place(
            stack, {"logits": logits.nbytes, "computed": nbytes, "drawn": nbytes}, "device"
        )
        backend._upload(made["logits"], logits.reshape(-1).view(np.uint8), 0)
        params = backend._place(stack, {"": 4 * PARAM_WORDS}, "upload")[""]
        backend._upload(params, np.array([tokens], np.uint32).view(np.uint8), 0)
        layout = device.layout(2, 12)
        bound = [(made["logits"], 0, logits.nbytes), (made["computed"], 0, nbytes)]
        sets = device.descriptors(stack, params, [(layout, 0, bound)])
        most = backend.info.limits.max_workgroup_count
        command = device.commands(stack, 1)[0]

        def dispatched(variant: Variant) -> Callable[[int], object]:
            code = (kernels.artifacts() / f"route.{variant.name}.spv").read_bytes()
            pipeline = device.pipeline("a benchmark", code, layout)
            groups = contract.groups({**push, "tokens": tokens, "most": most}, variant)
            call = api.Dispatch(pipeline, layout, sets[0], contract.pack(**push), groups, True)

            def made(count: int) -> object:
                api.record(command, [call] * count)
                return device.submission([command], timed=True)

            return made

        fragment = shaders.compiled("route.frag", {"EXPERTS": EXPERTS})
        drawn = bench_shaders.triangle_shader(), fragment
        reads = ((made["logits"].handle, logits.nbytes),)

        def drawing(copied: bool) -> Callable[[int], object]:
            pixels = Target(USED, tokens, "R32G32_UINT", reads, copied)
            make = device.drawing(stack, drawn, made["drawn"], pixels)
            return lambda count: make(count, True)

        def each(make: Callable[[int], object]) -> Timed:
            def run() -> float:
                times = [min(_seconds(backend, make(n)) for _ in range(3)) for n in (1, CHAIN + 1)]
                return max(times[1] - times[0], 1e-9) / CHAIN

            return run

        kernel = min(
            (each(dispatched(v)) for v in contract.variants),
            key=lambda run: min(run() for _ in range(3)),
        )
        ways = {"as a draw": drawing(True), "as a draw, not copied": drawing(False)}
        for name, way in ways.items():
            title = f"experts of {tokens} tokens {name}"
            row = _row(title, each(way), kernel, repeats)
            yield common.Row(row.name, row.unit, row.ours, row.peer, "route", row.ratio)
            if name == "as a draw":
                ratio = row.ours / (row.peer or row.ours)
                verdict = "would be taken" if ratio <= TAKEN else "is not taken"
                print(f"{title}: {ratio:.2f} of the dispatch; it {verdict}.", file=sys.stderr)
        a, b = (
            backend._download(made[name], nbytes, 0).view(np.uint32).reshape(-1, 2)
            for name in ("computed", "drawn")
        )
        shares = [np.ascontiguousarray(z[:, 1]).view(np.float32) for z in (a, b)]
        if not np.array_equal(a[:, 0], b[:, 0]) or not np.allclose(*shares, rtol=1e-4):
            raise SystemExit("A draw chooses other experts than the kernel.")


def measure(args: argparse.Namespace) -> list[common.Row]:
    """The rows, of a GPU (one in software where there is no other)."""
    args.device = "gpu"
    backend = common.backend(args)
    try:
        return list(rows(backend, 2 if args.quick else 5, args.quick))  # type: ignore[arg-type]
    finally:
        backend.close()


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").partition("\n")[0], measure))
