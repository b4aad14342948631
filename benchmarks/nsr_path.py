# SPDX-License-Identifier: Apache-2.0
"""Where the time of one video frame goes, from host memory to host memory.

    python -m benchmarks.nsr_path [--quick] [--json] [--device gpu|cpu] [--tiers T,T] [--size WxH]

Rows are named TIER SIZE WAY PART. WAY is `ring`: frames in a memfd that the device was told of, as
the daemon has them; `plain`: in memory that it does not know, with one copy each way by the host.
Parts of a frame (medians): `frame`, its `p99`, `upload` (the host's part of it), `wait` (from
handing over the submission until it is done), of that `device` by the device's own clock,
`download` (the host's part), `compare` (unchanged tiles), `check` (tiles that cannot be right),
`rest`; counts a frame: `submissions`, `copies`, and MB copied by the host and brought `direct`.

Alone, by the device's clock (the wall clock where it has none): `compute`, `up` and `down` (copy
commands), `empty` (wall clock of a submission of nothing), and each operation of the frame's
program.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from benchmarks import common, nsr_export
from benchmarks.nsr_ring import Place, slots
from engine.backends.base import NOWHERE, Backend, Into, RunStats
from engine.program import Program
from engine.video import plain, upscale
from engine.video.frames import FrameFormat
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline

SLOTS = 3


class Clock:
    """Seconds by part, taken around what does it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return work(*args, **named)
            finally:
                self.add(part, time.perf_counter() - begin)

        return timed

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


class Watched:
    """An executable whose parts of a frame are timed."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self._inner, self._clock = inner, clock
        self.write = clock.around("upload", inner.write)
        self.look = clock.around("download", inner.look)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def run(self, *sequences: str, into: Into = NOWHERE) -> RunStats:
        begin = time.perf_counter()
        stats: RunStats = self._inner.run(*sequences, into=into)
        took = time.perf_counter() - begin
        self._clock.add("wait", stats.wall_s)
        self._clock.add("device", stats.wall_s if stats.device_s is None else stats.device_s)
        self._clock.add("download", took - stats.wall_s)
        return stats


def watched(
    pipeline: VideoPipeline, places: list[Place], times: int
) -> Iterator[dict[str, float]]:
    """Seconds of each part, frame by frame."""
    cuts: list[Any] = [pipeline._fine, pipeline._coarse]
    inner = [cut.executable for cut in cuts]
    check, unchanged = plain.implausible, pipeline._unchanged
    assert unchanged is not None
    changed, keep = unchanged.changed, unchanged.keep
    held: Any = unchanged
    for number in range(times):
        clock = Clock()
        for cut, own in zip(cuts, inner, strict=True):
            cut.executable = Watched(own, clock)
        upscale.plain.implausible = clock.around("check", check)
        held.changed = clock.around("compare", changed)
        held.keep = clock.around("compare", keep)
        begin = time.perf_counter()
        pipeline.begin(*places[number % SLOTS])
        while not pipeline.step():
            pass
        total = time.perf_counter() - begin
        parts = clock.seconds
        known = sum(s for part, s in parts.items() if part != "device")
        yield {"frame": total, **parts, "rest": total - known}
    for cut, own in zip(cuts, inner, strict=True):
        cut.executable = own
    upscale.plain.implausible = check
    held.changed, held.keep = changed, keep


def frame_rows(
    backend: Backend, model: VideoModel, fmt: FrameFormat, name: str, times: int
) -> Iterator[common.Row]:
    """The parts of a frame, both ways."""
    for way in ("ring", "plain"):
        ring, places = slots(fmt, fmt.scaled(model.scale), SLOTS)
        adopted = backend.adopt(ring) if way == "ring" else None
        pipeline = VideoPipeline(backend, model, fmt, unchanged="exact")
        list(watched(pipeline, places, 6))
        before = backend.counters()
        found = list(watched(pipeline, places, times))
        after = backend.counters()
        label = f"{name} {way}"
        if way == "ring" and adopted is None:
            label += " (not adopted)"
        for part in found[0]:
            ms = 1e3 * statistics.median(f.get(part, 0.0) for f in found)
            yield common.row(f"{label} {part}", "ms a frame", ms, None, "none")
            if part == "frame":
                worst = sorted(f["frame"] for f in found)[-(-99 * times // 100) - 1]
                yield common.row(f"{label} p99", "ms a frame", 1e3 * worst, None, "none")
        for count in ("submissions", "copies"):
            each = (after[count] - before[count]) / times
            yield common.row(f"{label} {count}", "a frame", each, None, "none")
        for count in ("bytes_copied", "bytes_direct"):
            each = (after[count] - before[count]) / times / 1e6
            yield common.row(f"{label} {count[6:]}", "MB a frame", each, None, "none")
        yield from alone_rows(pipeline, places[0], label, times)
        pipeline.close()
        if adopted is not None:
            adopted.close()


def median_ms(work: Callable[[], RunStats], times: int, wall: bool = False) -> float:
    """Median of some slices by the device's clock, or by the host's."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        stats = work()
        took = time.perf_counter() - begin
        found.append(took if wall or stats.device_s is None else stats.device_s)
    return 1e3 * statistics.median(found)


def alone_rows(
    pipeline: VideoPipeline, place: Place, label: str, times: int
) -> Iterator[common.Row]:
    """The device's parts of the first band, one at a time."""
    bands: Any = pipeline._bands
    exe: Any = pipeline.executable
    spans = [bands.out_span(0, i) for i in range(len(place[1]))]
    into = {f"out{i}": p[slice(*s)] for i, (p, s) in enumerate(zip(place[1], spans, strict=True))}
    source = upscale.as_planes(place[0], pipeline.format.planes(), pipeline.format.sample_bytes)
    sequences = [s for s in ("tiles", "planes") if s in exe.program.sequences]

    def up() -> RunStats:
        bands.load(0, source)
        stats: RunStats = exe.run()
        return stats

    bands.run(0, pipeline.tiling.batch)
    for part, work in (
        ("compute", lambda: exe.run(*sequences)),
        ("up", up),
        ("down", lambda: exe.run(into=into)),
    ):
        yield common.row(f"{label} {part}", "ms a band", median_ms(work, times), None, "none")
    empty = median_ms(lambda: exe.run(), times, wall=True)
    yield common.row(f"{label} empty", "ms", empty, None, "none")


def operation_rows(
    backend: Backend, model: VideoModel, fmt: FrameFormat, name: str, times: int
) -> Iterator[common.Row]:
    """Each operation of a band alone, calls of it together."""
    pipeline = VideoPipeline(backend, model, fmt)
    words: Any = pipeline._bands
    whole: Program = words.executable.program
    calls = [c for some in whole.sequences.values() for c in some]
    single = replace(whole, sequences={f"{i}": (call,) for i, call in enumerate(calls)})
    exe = backend.executable(single, model.weights)
    words.executable, inner = exe, words.executable
    _, places = slots(fmt, fmt.scaled(model.scale), SLOTS)
    planes = upscale.as_planes(places[0][0], fmt.planes(), fmt.sample_bytes)
    words.load(0, planes)
    words._words[0] = min(pipeline.tiling.batch, pipeline.tiling.columns)
    exe.write("params", words._words)
    took: dict[str, float] = {}
    for i, call in enumerate(calls):
        ms = median_ms(lambda i=i: exe.run(f"{i}"), times)  # type: ignore[misc]
        key = f"{call.op}.{call.variant}"
        took[key] = took.get(key, 0.0) + ms
    words.executable = inner
    exe.close()
    pipeline.close()
    for key, ms in took.items():
        yield common.row(f"{name} {key}", "ms a band", ms, None, "none")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--tiers", default="fast,balanced", help="fast,balanced,quality")
    parser.add_argument("--far", action="store_true", help="as if the host saw no device memory")
    parser.add_argument("--size", default="1920x1080", help="of the frames that come")


def _far() -> Backend:
    """The GPU as one whose memory the host does not see."""
    from engine.backends.vulkan import VulkanBackend

    return VulkanBackend(allow_software=True, force_staging=True)


def measure(args: argparse.Namespace) -> list[common.Row]:
    times = 9 if args.quick else 300
    width, height = map(int, args.size.split("x"))
    backend = _far() if args.far else common.backend(args)
    rows: list[common.Row] = []
    for tier in args.tiers.split(","):
        model = VideoModel.load(str(nsr_export.shipped(tier)), backend)
        fmt, name = FrameFormat(width, height), f"{tier} {width}x{height}"
        rows += frame_rows(backend, model, fmt, name, times)
        rows += operation_rows(backend, model, fmt, name, times)
        model.close()
    backend.close()
    return rows


def facts() -> dict[str, str]:
    """What the device offers for frames."""
    from engine.backends.vulkan import list_devices

    found = next((v.candidate.info for v in list_devices(allow_software=True) if v.chosen), None)
    told = "host_memory" in found.features if found else False
    return {
        "device": f"{found.name}, {found.driver}" if found else "none",
        "imports host memory": "yes" if told else "no",
    }


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
