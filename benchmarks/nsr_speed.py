# SPDX-License-Identifier: Apache-2.0
"""Milliseconds a frame of the luma networks against ncnn, onnxruntime and swscale.

    python -m benchmarks.nsr_speed [--quick] [--json] [--threads N] [--device cpu|gpu] [--alone]

Rows are named TIER SIZE PEER; the ratio says how many times faster ours is. All run the same
network. A frame goes from 8-bit memory to 8-bit memory, luma alone, float32 on both sides, runs
interleaved; the peers' outputs are compared with ours first (one step of 255 at most).
`onnxruntime int8` is int8 on both sides, `int8 to f32` how near ours is to float32. `swscale` is
Lanczos, another algorithm, against ours in float32, as users get it; `swscale int8` against ours by
`--precision model` (the fast tier in int8 on CPUs with instructions for it). With `--device gpu`
ours and ncnn run by Vulkan, transfers included.

Without a peer: `i420`, the whole frame with chroma, of which `p99`, `upload`, `device` (its own
clock, transfers by the kernels included; the wall clock where it has none), `download` and `host`
are parts; `bytes` and `bytes by layers`, what luma moves through memory by the bindings of its
Program, as it runs and with a call for each layer; `energy`, where a sensor is; `streams`, see
nsr_streams. `--alone` measures ours without any peer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import common, nsr_export, nsr_peers, peers
from benchmarks.nsr_ring import picture, slots
from engine.backends.base import NOWHERE, Array, Backend, Executable, Into, RunStats
from engine.program import Program
from engine.video.frames import FrameFormat
from engine.video.lowering import lower
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline
from kernels import op as contract_of

Bytes = npt.NDArray[np.uint8]
TIERS = ("fast", "balanced", "quality")
SIZES = [(480, 270), (960, 540)]
_RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")


class Watched:
    """An executable whose parts of a frame are timed."""

    def __init__(self, inner: Executable) -> None:
        self._inner = inner
        self.seconds = dict.fromkeys(("upload", "device", "download"), 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _timed(self, what: str, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        self.seconds[what] += time.perf_counter() - begin
        return result

    def write(self, buffer: str, data: Array | bytes, offset: int = 0) -> None:
        self._timed("upload", lambda: self._inner.write(buffer, data, offset))

    def look(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        seen: Array = self._timed("download", lambda: self._inner.look(buffer, nbytes, offset))
        return seen

    def run(self, *sequences: str, into: Into = NOWHERE) -> RunStats:
        begin = time.perf_counter()
        stats = self._inner.run(*sequences, into=into)
        self.seconds["download"] += time.perf_counter() - begin - stats.wall_s
        self.seconds["device"] += stats.wall_s if stats.device_s is None else stats.device_s
        return stats


class Ours:
    """A pipeline with its planes, which lie as the daemon has them."""

    def __init__(self, backend: Backend, model: VideoModel, luma: Bytes, pixel: str) -> None:
        height, width = luma.shape
        fmt = FrameFormat(width, height, pixel)
        memory, [(self.source, self.target)] = slots(fmt, fmt.scaled(model.scale), 1)
        self.source[0][:, :width] = luma
        self._adopted = backend.adopt(memory)
        self.pipeline = VideoPipeline(backend, model, fmt)
        self.width = model.scale * width

    def frame(self) -> Bytes:
        self.pipeline.begin(self.source, self.target)
        while not self.pipeline.step():
            pass
        return self.target[0][:, : self.width]

    def watched(self, times: int) -> dict[str, float]:
        """Median milliseconds of a frame and of its parts, and the 99th of 100 of frames."""
        bands = self.pipeline._bands
        inner, found = bands.executable, []
        for _ in range(times):
            watch: Any = Watched(inner)
            bands.executable = watch
            begin = time.perf_counter()
            self.frame()
            total = time.perf_counter() - begin
            parts = watch.seconds
            found.append({"i420": total, **parts, "host": total - sum(parts.values())})
        bands.executable = inner
        middle = {k: 1e3 * statistics.median(f[k] for f in found) for k in found[0]}
        worst = sorted(f["i420"] for f in found)[-(-99 * times // 100) - 1]
        return {**middle, "p99": 1e3 * worst}


def moved_bytes(program: Program, bands: int, slices: int) -> int:
    """What the calls of a frame read and write, by the sizes of what they bind; a band's rows
    count once.
    """
    total = 0
    for calls in program.sequences.values():
        for call in calls:
            for bind, place in zip(contract_of(call.op).bindings, call.bindings, strict=True):
                buffer = program.buffers[place.buffer]
                nbytes = buffer.nbytes - place.offset if place.nbytes is None else place.nbytes
                times = bands if buffer.kind in ("input", "output") else slices
                total += nbytes * times * (2 if bind.access == "rw" else 1)
    return total


def milliseconds(run: Callable[[], Any], times: int) -> float:
    """Median of some frames in a row."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found)


def joules(run: Callable[[], Any], times: int) -> float | None:
    """The package's energy a frame; None without a sensor that can be read."""
    try:
        before = int(_RAPL.read_text("ascii"))
        for _ in range(times):
            run()
        after = int(_RAPL.read_text("ascii"))
    except (OSError, ValueError):
        return None
    return (after - before) * 1e-6 / times if after > before else None


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--tiers", default=",".join(TIERS), help="fast,balanced,quality")


def _against(
    ours: Ours, file: Path, luma: Bytes, args: argparse.Namespace, name: str
) -> Iterator[common.Row]:
    """Rows against each peer that there is for the device."""
    gpu, (repeats, times) = args.device == "gpu", (3, 3) if args.quick else (7, 5)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        runners = {"ncnn": nsr_peers.ncnn(file, luma, args.threads, folder, gpu)}
        if not gpu:
            runners["onnxruntime"] = nsr_peers.onnxruntime(file, luma, args.threads, folder)
        wanted = ours.frame().astype(int)
        for peer, run in runners.items():
            worst = int(np.abs(run().astype(int) - wanted).max())
            if worst > 1:
                raise SystemExit(f"{peer} differs from ours by {worst} steps")
            a, b = common.interleaved(
                lambda: milliseconds(ours.frame, times),
                lambda r=run: milliseconds(r, times),  # type: ignore[misc]
                repeats,
            )
            middle = statistics.median(a), statistics.median(b)
            yield common.row(f"{name} {peer}", "ms a frame", *middle, peer)


def _int8(
    backend: Backend, file: Path, luma: Bytes, args: argparse.Namespace, name: str
) -> Iterator[common.Row]:
    """int8 against int8 (only onnxruntime has it), and against our own float32 in dB."""
    repeats, times = (3, 3) if args.quick else (7, 5)
    model = VideoModel.load(str(file), backend)
    if model.int8() is model:
        model.close()
        return
    plain, ours = (Ours(backend, m, luma, "gray") for m in (model, model.int8()))
    error = float(np.mean((plain.frame().astype(float) - ours.frame()) ** 2))
    yield common.row(
        f"{name} int8 to f32", "dB", 10 * float(np.log10(255**2 / max(error, 1e-9))), None, "none"
    )
    with tempfile.TemporaryDirectory() as place:
        run = nsr_peers.onnxruntime(file, luma, args.threads, Path(place), int8=True)
        a, b = common.interleaved(
            lambda: milliseconds(ours.frame, times), lambda: milliseconds(run, times), repeats
        )
    middle = statistics.median(a), statistics.median(b)
    yield common.row(f"{name} onnxruntime int8", "ms a frame", *middle, "onnxruntime")
    model.close()


def _swscale(
    backend: Backend, model: VideoModel, luma: Bytes, args: argparse.Namespace, name: str
) -> Iterator[common.Row]:
    """swscale's Lanczos against float32, and against what the model is made for."""
    lanczos = nsr_peers.swscale(luma, args.threads)
    if lanczos is None:
        return
    repeats, times = (3, 3) if args.quick else (7, 5)
    for label, precision in (("swscale", "f32"), ("swscale int8", "model")):
        ours = Ours(backend, nsr_export.precise(model, precision), luma, "gray")
        ours.frame()
        a, b = common.interleaved(
            lambda o=ours: milliseconds(o.frame, times),  # type: ignore[misc]
            lambda: milliseconds(lanczos, times),
            repeats,
        )
        middle = statistics.median(a), statistics.median(b)
        yield common.row(f"{name} {label}", "ms a frame", *middle, "swscale")


def _parts(whole: Ours, name: str, times: int) -> Iterator[common.Row]:
    """The whole frame, and where its time goes."""
    whole.frame()
    for part, ms in whole.watched(times).items():
        yield common.row(f"{name} {part}", "ms a frame", ms, None, "none")
    energy = joules(whole.frame, times)
    if energy is not None:
        yield common.row(f"{name} energy", "J a frame", energy, None, "none")


def _traffic(gray: Ours, model: VideoModel, backend: Backend, name: str) -> Iterator[common.Row]:
    pipeline = gray.pipeline
    for label, fuse in (("bytes", None), ("bytes by layers", False)):
        tiling = pipeline.tiling
        program = lower(model.networks, backend.info, pipeline.format, tiling, fuse=fuse)
        mb = moved_bytes(program, tiling.bands, pipeline.slices) / 1e6
        yield common.row(f"{name} {label}", "MB a frame", mb, None, "none")


def measure(args: argparse.Namespace) -> list[common.Row]:
    if not args.alone:
        for package in ("onnx", "onnxruntime", "ncnn"):
            peers.wheel(package)
    gpu = args.device == "gpu"
    backend = common.backend(args)
    rows: list[common.Row] = []
    for tier in args.tiers.split(","):
        file = nsr_export.shipped(tier)
        model = VideoModel.load(str(file), backend)
        sizes = [*SIZES, (1920, 1080)] if gpu else SIZES
        for width, height in sizes[: 1 if args.quick else None]:
            luma, name = picture(width, height), f"{tier} {width}x{height}"
            gray = Ours(backend, model, luma, "gray")
            if not args.alone:
                rows += _against(gray, file, luma, args, name)
                rows += [] if gpu else _int8(backend, file, luma, args, name)
                if tier == "fast" and not gpu:
                    rows += _swscale(backend, model, luma, args, name)
            whole = Ours(backend, model, luma, "i420")
            rows += _parts(whole, name, 9 if args.quick else 100 if gpu else 25)
            rows += _traffic(gray, model, backend, name)
        model.close()
    backend.close()
    if not args.quick:
        from benchmarks import nsr_streams  # a daemon and its client, which a bare machine lacks

        rows += nsr_streams.measure(args)
    return rows


def facts() -> dict[str, str]:
    """What a pixel costs, and the peers' settings."""
    cost = {t: round(nsr_export.macs(nsr_export.shipped(t))) for t in TIERS}
    told = {"MAC an output pixel": ", ".join(f"{t} {c}" for t, c in cost.items())}
    told["energy"] = f"{_RAPL}" if _RAPL.exists() else "unknown: there is no sensor"
    return told | {f"peer {name}": text for name, text in nsr_peers.SETTINGS.items()}


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
