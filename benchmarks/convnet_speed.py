# SPDX-License-Identifier: Apache-2.0
"""Milliseconds a frame of other people's networks against ncnn.

    python -m benchmarks.convnet_speed [--quick] [--json] [--threads N] [--device cpu|gpu]
        [--network NAME …] [--size WxH …] [--repeats N] [--parts]

Rows are named NETWORK SIZE PEER; the ratio says how many times faster ours is. Both run the same
weights, in turn. Ours takes 8-bit red, green and blue planes from a ring in host memory, as the
daemon has it, to that ring; ncnn floats, without the way from and to bytes. On the CPU both compute
in float32.

With `--device gpu` by Vulkan: ncnn in 16 bits, its faster way, with and without Winograd's
convolutions and sums in 32 bits. All are timed and held against what our CPU makes of some parts of
the frame. Ours has to be within AGREE dB of that. A row is against the fastest way of ncnn that is;
where a faster one is not, there is a row for it too, which says how far it is off. `--parts` prints
where our time goes, and what ncnn's way to the device and back takes (benchmarks/convnet_parts.py).
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import common, convnet_parts, convnet_peers, nsr_ring, peers
from benchmarks.convnet_peers import Runner, Way
from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.importers import convnets
from engine.video import convnet, frames
from engine.video.convnet import ConvModel
from engine.video.convnet_run import ConvPipeline
from engine.video.frames import FrameFormat

Array = npt.NDArray[Any]
ROWS = {  # network: sizes
    "animevideov3-x2": [(480, 270), (960, 540)],
    "span-x2": [(480, 270)],
    "x4plus": [(160, 120)],
}
GPU_SIZES = [(960, 540), (1920, 1080)]
AGREE = 50.0  # dB
PART = 64  # samples along the side of a part that our CPU computes too
AROUND = 32  # around it; networks that see more are checked on
SMALL = 96  # such samples of the frame's corner alone


class Ours:
    """A network on frames of one size: `image` is uint8 [3, rows, columns]."""

    def __init__(self, backend: Backend, model: ConvModel, image: Array) -> None:
        fmt = FrameFormat(image.shape[2], image.shape[1], "i444", 8, "centre", True, "rgb")
        memory, [(self.source, self.target)] = nsr_ring.slots(fmt, fmt.scaled(model.scale), 1)
        self._adopted = backend.adopt(memory)
        self.pipeline = ConvPipeline(backend, model, fmt)
        self._width = self.pipeline.out_format.width
        for plane, channel in zip(self.source, image, strict=True):
            frames.samples(plane, fmt.width, 8)[:] = channel

    def frame(self) -> None:
        self.pipeline.begin(self.source, self.target)
        while not self.pipeline.step():
            pass

    def result(self) -> Array:
        """The frame, uint8 [3, rows, columns]."""
        self.frame()
        return np.stack([plane[:, : self._width] for plane in self.target])

    def close(self) -> None:
        self.pipeline.close()
        if self._adopted is not None:
            self._adopted.close()


@dataclass(frozen=True)
class Error:
    """How far a result is from what it should be, of samples of 0..255."""

    decibels: float
    worst: float

    @property
    def right(self) -> bool:
        return self.decibels >= AGREE

    def __str__(self) -> str:
        return f"{self.decibels:.1f} dB, {self.worst:.0f} steps at most"


class Wanted:
    """What parts of a frame should become, by our CPU: at two corners and in the middle. `image`:
    the frame, or its corner for networks that see far.
    """

    def __init__(self, model: ConvModel, image: Array, threads: int) -> None:
        """model: on any backend, which is not used."""
        self._parts: list[tuple[slice, slice, Array]] = []
        self._scale = model.scale
        if model.plan.radius > AROUND:
            image = np.ascontiguousarray(image[:, :SMALL, :SMALL])
        self.image = image
        rows, columns = image.shape[1:]
        for share in (0.0, 0.5, 1.0):
            (y, top, core_y), (x, left, core_x) = (_span(n, share) for n in (rows, columns))
            enlarged = cpu_result(model, image[:, y, x], threads)
            own = [
                slice(self._scale * (core.start - begin), self._scale * (core.stop - begin))
                for core, begin in ((core_y, top), (core_x, left))
            ]
            self._parts.append((core_y, core_x, enlarged[:, own[0], own[1]].astype(np.float64)))

    def error(self, made: Array) -> Error:
        """Of what became of `image`, uint8 or values of 0..255, [3, rows, columns]."""
        s, off = self._scale, []
        for y, x, wanted in self._parts:
            got = made[:, s * y.start : s * y.stop, s * x.start : s * x.stop]
            off.append(np.abs(np.rint(got.astype(np.float64)) - wanted).reshape(-1))
        every = np.concatenate(off)
        mean = max(float(np.square(every).mean()), 1e-6)  # 108 dB where nothing is off
        return Error(10 * np.log10(255**2 / mean), float(every.max()))


def _span(size: int, share: float) -> tuple[slice, int, slice]:
    """A part along an axis with what is around it, where that begins, and the part alone."""
    own = min(PART, size)
    at = int((size - own) * share) // 2 * 2
    begin, end = (0, size) if size <= SMALL else (max(0, at - AROUND), min(size, at + own + AROUND))
    return slice(begin, end), begin, slice(at, at + own)


def cpu_result(model: ConvModel, image: Array, threads: int) -> Array:
    """uint8 [3, rows, columns] enlarged by our CPU."""
    with ExitStack() as stack:
        backend = CpuBackend(threads)
        stack.callback(backend.close)
        same = ConvModel(model.file, backend)
        stack.callback(same.close)
        return result(backend, same, image)


def result(backend: Backend, model: ConvModel, image: Array) -> Array:
    """uint8 [3, rows, columns] enlarged."""
    ours = Ours(backend, model, image)
    try:
        return ours.result()
    finally:
        ours.close()


def picture(width: int, height: int) -> Array:
    """Edges, ramps and a little noise on the left, noise alone on the right: uint8 [3, ...]."""
    luma = nsr_ring.picture(width, height)
    image = np.stack([luma, 255 - luma, np.roll(luma, 5, 1)])
    half = image[:, :, width // 2 :]
    half[:] = np.random.default_rng(1).integers(0, 256, half.shape, np.uint8)
    return image


def milliseconds(run: Callable[[], object], times: int = 1) -> float:
    """Median of some frames in a row."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found)


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Peer:
    """ncnn in one way, which was timed a little and checked."""

    way: Way
    runner: Runner
    milliseconds: float
    error: Error

    @property
    def name(self) -> str:
        wrong = "" if self.error.right else f", WRONG: {self.error}"
        return f"ncnn, {self.way.name}{wrong}"


def chosen(found: list[Peer]) -> list[Peer]:
    """The fastest that is right, if any, and the fastest of all where that is another one."""
    by_time = sorted(found, key=lambda peer: peer.milliseconds)
    right = [peer for peer in by_time if peer.error.right]
    return [*right[:1], *(by_time[:1] if by_time[:1] != right[:1] else [])]


class Bench:
    """One network on one device."""

    def __init__(self, args: argparse.Namespace, backend: Backend, name: str) -> None:
        self.args, self.backend, self.name = args, backend, name
        self.gpu = args.device == "gpu"
        self.repeats = args.repeats or (3 if args.quick else 9)
        param = convnet_peers.network(name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.pvrm")
            convnet.write(path, convnets.load(param), "f16", {"name": name})
            self.model = ConvModel.load(str(path), backend)
        ways = convnet_peers.GPU if self.gpu else (convnet_peers.CPU,)
        self.runners = {way: convnet_peers.runner(param, args.threads, way) for way in ways}

    def _peer(self, way: Way, floats: Array, wanted: Wanted) -> Peer:
        run = self.runners[way]
        made = run(wanted.image.astype(np.float32) / 255)
        error = wanted.error(np.clip(made, 0, 1) * 255)
        run.compute(floats)
        taken = milliseconds(lambda: run.compute(floats), 3) if self.gpu else 0.0
        if self.gpu:
            say(f"  ncnn, {way.name}: {taken:.1f} ms, {error}")
        return Peer(way, run, taken, error)

    def rows(self, width: int, height: int) -> Iterator[common.Row]:
        """Raises SystemExit: ours is wrong, or on the CPU ncnn's is another result."""
        title = f"{self.name} {width}x{height}"
        image = picture(width, height)
        floats = image.astype(np.float32) / 255
        wanted = Wanted(self.model, image, self.args.threads)
        error = wanted.error(result(self.backend, self.model, wanted.image))
        say(f"{title}: ours is off our CPU's by {error}")
        if not error.right:
            raise SystemExit(f"{title}: ours is wrong.")
        ours = Ours(self.backend, self.model, image)
        ours.frame()
        found = [self._peer(way, floats, wanted) for way in self.runners]
        if not self.gpu and not found[0].error.right:
            raise SystemExit(f"{title}: ncnn differs from ours by {found[0].error}.")
        for peer in chosen(found):
            a, b = common.interleaved(
                lambda: milliseconds(ours.frame),
                lambda p=peer: milliseconds(lambda: p.runner.compute(floats)),  # type: ignore[misc]
                self.repeats,
            )
            end = "" if peer.error.right else " (wrong)"
            middle = statistics.median(a), statistics.median(b)
            row = common.row(f"{title} ncnn{end}", "ms a frame", *middle, peer.name)
            say(f"{row.name}: ours {row.ours:.2f}, {peer.name} {row.peer:.2f}: {row.ratio:.2f}x")
            yield row
        if self.args.parts:
            convnet_parts.tell(ours, self.backend, self.model, say)
            if self.gpu:
                self._there_and_back(floats)
        ours.close()

    def _there_and_back(self, floats: Array) -> None:
        with tempfile.TemporaryDirectory() as folder:
            run = convnet_peers.there_and_back(Path(folder), self.args.threads)
        run.compute(floats)
        taken = milliseconds(lambda: run.compute(floats), 3)
        say(f"  ncnn, the frame to the device and twice as large back: {taken:.1f} ms")

    def close(self) -> None:
        self.model.close()


def measure(args: argparse.Namespace) -> list[common.Row]:
    peers.wheel("ncnn")
    backend = common.backend(args)
    rows: list[common.Row] = []
    for name in args.network or list(ROWS)[: 1 if args.quick else None]:
        bench = Bench(args, backend, name)
        sizes = GPU_SIZES if args.device == "gpu" else ROWS.get(name, [(160, 120)])
        for width, height in args.size or sizes[: 1 if args.quick else None]:
            rows += bench.rows(width, height)
        bench.close()
    backend.close()
    return rows


def size(text: str) -> tuple[int, int]:
    """WxH."""
    if not (found := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 1920x1080")
    return int(found[1]), int(found[2])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--network", nargs="+", choices=convnet_peers.NETWORKS)
    parser.add_argument("--size", nargs="+", type=size, metavar="WxH")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--parts", action="store_true", help="where our time goes, on stderr")


def facts() -> dict[str, str]:
    """The peer's version and the networks' packages."""
    packages = ", ".join(f"{k} {v}" for k, v in convnet_peers.PACKAGES.items())
    return {"peers": f"ncnn {peers.wheel('ncnn')}", "networks": packages}


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
