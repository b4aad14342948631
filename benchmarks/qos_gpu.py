# SPDX-License-Identifier: Apache-2.0
"""What a compositor that shares the GPU with pvrd loses: the GPU part of benchmarks/qos.

Each run draws the frames of benchmarks/qos_compositor with nobody else first (6 ms of the device at
60 Hz, the number of layers found then), and then the same frames in the cases of `--cases`:

pvrd       beside pvrd that writes with a model of an 8B model's shape and enlarges a 1920x1080
           stream to 4K, each frame due when the next one comes
blind      the same without reports of the compositor's misses: pvrd has its canary alone
wallpaper  B5: a wallpaper that takes 65 % of the device, beside the video alone; a stream of 30
           frames/s, of which 25 have to come in time
llama      beside llama.cpp's llama-bench by Vulkan that decodes with the same file; needs
           PVRD_LLAMA_VULKAN, its folder

The compositor's missed refreshes and latency go to pvrd once a second through
Manager.ReportCompositor: the benchmark stands for pvr-agent there, since no Wayland compositor is
at work. pvrd's other signal is its own canary. Rows come on stderr as they are known; a case that
fails says why, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import common
from benchmarks.qos_jobs import Job, job
from benchmarks.qos_programs import (
    HZ,
    Compositor,
    Frames,
    compositor,
    decisions,
    llama,
    model,
    pvrd,
    say,
)  # fmt: skip
from benchmarks.qos_time import Time
from benchmarks.qos_weston import TOOLS
from pvrd.client import Client
from pvrd.errors import PvrdError

PERIOD_MS = 1000.0 / HZ
BUDGET_MS = 6.0
WALLPAPER = 0.65  # of the device's time
WALLPAPER_FPS, OFFERED_FPS = 25.0, 30.0  # that are claimed, and that there are
TARGET = 1.10  # of the p99 alone
HALF = 0.5  # of the tokens alone
CASES = ("pvrd", "blind", "wallpaper", "llama")
SETTLE = int(3 * HZ)  # frames until the governor has seen the compositor


@dataclass
class Beside:
    """What pvrd got done in a stretch."""

    tokens_s: float
    video: dict[str, float]

    @property
    def in_time(self) -> float:
        """Percent of the frames."""
        return 100 * self.video.get("in_time", 0) / max(1, self.video.get("sent", 0))

    @property
    def own(self) -> float:
        """Percent of the frames that came in time and from the session's own network."""
        less = self.video.get("lower", 0)
        return max(0.0, 100 * (self.video.get("in_time", 0) - less)) / max(
            1, self.video.get("sent", 0)
        )


def shares(beside: float, alone: float, both: float) -> str:
    """Of tokens/s beside a compositor: the parts of what text has without one, alone and beside the
    same stream.
    """
    return (
        f"{beside / alone if alone else 0.0:.2f} of what it has alone ({alone:.1f} tokens/s;"
        f" {HALF:.2f} is the aim), {beside / both if both else 0.0:.2f} of what it has beside the"
        f" stream without a compositor ({both:.1f})"
    )


def stretch(text: Job | None, video: Job | None) -> Beside:
    """What both did since the last time."""
    done = text.stretch() if text else {}
    rate = done.get("tokens", 0) / done["seconds"] if done else 0.0
    return Beside(rate, video.stretch() if video else {})


def measured(
    work: Compositor, agent: Client | None, text: Job | None, video: Job | None
) -> tuple[Frames, Beside]:
    """The frames of a compositor beside pvrd, and what pvrd did meanwhile."""
    frames = work.frames(agent, lambda: stretch(text, video))
    return frames, stretch(text, video)


def _rows_of(name: str, frames: Frames, alone: Frames, peer: str) -> Iterator[common.Row]:
    yield common.row(f"{name} frame p50", "ms", frames.p50, alone.p50, peer)
    yield common.row(f"{name} frame p99", "ms", frames.p99, alone.p99, peer)
    missed, theirs = frames.missed_of_1000, alone.missed_of_1000
    ratio = theirs / missed if missed else None
    yield common.Row(f"{name} missed refreshes", "of 1000", missed, theirs, peer, ratio)
    limit = TARGET * alone.p99
    yield common.Row(f"{name} frames over target", "%", frames.over(limit), None, "none", None)


class Bench:
    """One run: the compositor alone, then whatever cases are asked for."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.time = Time(args.seconds, args.cases.split(","), args.frames, HZ)
        self.video = ["video", "--size", args.video, "--model", args.tier]
        self.beside: Frames | None = None  # of the case pvrd

    def alone(self) -> Iterator[common.Row]:
        """Nobody but the compositor."""
        count = self.time.frames("alone")
        with compositor(self.args, BUDGET_MS, frames=count) as work:
            self.lone = alone = work.frames()
        say(f"compositor: {alone.device}, {alone.layers} layers, alone p99 {alone.p99:.2f} ms")
        yield common.row("alone frame p50", "ms", alone.p50, BUDGET_MS, "the budget")
        yield common.row("alone frame p99", "ms", alone.p99, None, "none")
        missed = alone.missed_of_1000
        yield common.Row("alone missed refreshes", "of 1000", missed, None, "none", None)
        began = time.monotonic()
        self.file = model(self.args, self.folder)
        say(f"{self.file.name} is written, {time.monotonic() - began:.0f} s")

    def pvrd(self, cases: list[str]) -> Iterator[common.Row]:
        """Text and video, with reports and without, on one daemon."""
        args, lone, layers = self.args, self.args.lone, self.lone.layers
        with contextlib.ExitStack() as stack:
            env = stack.enter_context(pvrd(args, self.folder / "pvrd", self.file.parent))
            agent = stack.enter_context(Client(env["PVRD_BUS"]))
            began = time.monotonic()
            text = stack.enter_context(job(["text", "--model", self.file.stem], env))
            say(f"pvrd writes, after {time.monotonic() - began:.0f} s")
            time.sleep(0.3 * lone)
            stretch(text, None)
            time.sleep(lone)
            only = stretch(text, None)
            say(f"lone text: {only.tokens_s:.1f} tokens/s")
            video = stack.enter_context(job([*self.video, "--fps", str(args.fps)], env))
            time.sleep(0.5 * lone)
            stretch(text, video)
            time.sleep(lone)
            both = stretch(text, video)
            say(f"text and video: {both.tokens_s:.1f} tokens/s, {both.video}")
            if "pvrd" in cases:
                count = self.time.frames("pvrd", begun=True)
                with compositor(args, BUDGET_MS, layers, count, SETTLE) as work:
                    frames, got = measured(work, agent, text, video)
                say(f"beside the compositor: {got.tokens_s:.1f} tokens/s, {got.video}")
                say(f"text: {shares(got.tokens_s, only.tokens_s, both.tokens_s)}")
                self.beside = frames
                yield from self._pvrd_rows(frames, got, only, both)
            if "blind" in cases:
                count = self.time.frames("blind")
                with compositor(args, BUDGET_MS, layers, count, SETTLE) as work:
                    frames, got = measured(work, None, text, video)
                say(f"without reports: {got.tokens_s:.1f} tokens/s, {got.video}")
                yield from _rows_of("pvrd without reports", frames, self.lone, "alone")
            if args.trace:
                trace(args, layers, env)
        for line in decisions(self.folder / "pvrd"):
            say(f"  {line}")

    def _pvrd_rows(
        self, frames: Frames, got: Beside, only: Beside, both: Beside
    ) -> Iterator[common.Row]:
        alone = self.lone
        yield from _rows_of("pvrd", frames, alone, "alone")
        yield common.row("pvrd frame p99", "ms", frames.p99, TARGET * alone.p99, "target")
        half = HALF * only.tokens_s
        yield common.row("pvrd text", "tokens/s", got.tokens_s, half, "target")
        yield common.row("pvrd text", "tokens/s", got.tokens_s, only.tokens_s, "lone")
        yield common.row("pvrd text", "tokens/s", got.tokens_s, both.tokens_s, "lone with video")
        yield common.row("pvrd video in time", "%", got.in_time, both.in_time, "no compositor")
        yield common.row("pvrd video in time, own network", "%", got.own, both.own, "no compositor")

    def wallpaper(self) -> Iterator[common.Row]:
        """B5; the wallpaper alone first."""
        args, budget = self.args, WALLPAPER * PERIOD_MS
        count = self.time.frames("wallpaper")
        with compositor(args, budget, 0, count) as work:
            alone = work.frames()
        with contextlib.ExitStack() as stack:
            env = stack.enter_context(pvrd(args, self.folder / "wall", self.file.parent))
            agent = stack.enter_context(Client(env["PVRD_BUS"]))
            video = stack.enter_context(job([*self.video, "--fps", str(OFFERED_FPS)], env))
            with compositor(args, budget, alone.layers, count, SETTLE) as work:
                frames, shown = measured(work, agent, None, video)
            say(f"beside the wallpaper: {shown.video}")
        rate = shown.video.get("in_time", 0) / shown.video["seconds"]
        yield common.row("65 % wallpaper, 4K", "frames/s", rate, WALLPAPER_FPS, "target")
        yield common.Row("65 % wallpaper, own network", "%", shown.own, None, "none", None)
        yield from _rows_of("65 % wallpaper", frames, alone, "alone")
        for line in decisions(self.folder / "wall"):
            say(f"  {line}")

    def llama(self) -> Iterator[common.Row]:
        """The peer."""
        if not os.environ.get("PVRD_LLAMA_VULKAN"):
            raise SystemExit("the case llama needs PVRD_LLAMA_VULKAN")
        with (
            llama(self.args, self.file) as other,
            compositor(
                self.args, BUDGET_MS, self.lone.layers, self.time.frames("llama", begun=True)
            ) as work,
        ):
            begin = time.monotonic()
            lone = statistics.median(rate for _, rate in other.rates[:3])
            frames = work.frames()
            rate = other.between(begin + 0.1 * frames.seconds, time.monotonic())
        yield from _rows_of("llama.cpp", frames, self.lone, "alone")
        yield common.row("llama.cpp text", "tokens/s", rate, lone, "lone")
        if self.beside is not None:
            yield common.row("pvrd frame p99", "ms", self.beside.p99, frames.p99, "llama.cpp")


def trace(args: argparse.Namespace, layers: int, env: dict[str, str]) -> None:
    """Two seconds of slices and of frames, on one clock, in the folder `--trace`."""
    args.trace.mkdir(parents=True, exist_ok=True)
    frames: list[Frames] = []
    with compositor(args, BUDGET_MS, layers, int(4 * HZ)) as work, Client(env["PVRD_BUS"]) as one:
        drawing = threading.Thread(target=lambda: frames.append(work.frames()))
        drawing.start()
        time.sleep(1.0)
        fd = one.trace(2.0)
        drawing.join()
    with open(fd, "rb") as told:
        told.seek(0)
        (args.trace / "slices.json").write_bytes(told.read())
    both = {"began_s": frames[0].began_s, "took_ms": frames[0].took_ms}
    (args.trace / "frames.json").write_text(json.dumps(both))


def tried(
    args: argparse.Namespace, case: str, rows: Callable[[], Iterator[common.Row]]
) -> Iterator[common.Row]:
    """The rows of a case, as far as it gets: the others stand without it. args.failed has why."""
    try:
        yield from rows()
    except (SystemExit, PvrdError, OSError, TOOLS["Failure"]) as e:
        args.failed.append(f"{case}: {e}")
        say(f"{case} failed: {e}")


def measure(args: argparse.Namespace, folder: Path) -> Iterator[common.Row]:
    """The cases that are asked for; rows as they come to be known.

    Raises:
        SystemExit: a case that there is not, or the compositor cannot draw.
    """
    cases = args.cases.split(",")
    if strange := set(cases) - set(CASES):
        raise SystemExit(f"there is no case {sorted(strange)[0]}, but {', '.join(CASES)}")
    bench = Bench(args, folder)
    within = bench.time.rows
    yield from within("alone", bench.alone)()
    if {"pvrd", "blind"} & set(cases):
        last = "blind" if "blind" in cases else "pvrd"
        yield from tried(args, "pvrd", within(last, lambda: bench.pvrd(cases)))
    if "wallpaper" in cases:
        yield from tried(args, "wallpaper", within("wallpaper", bench.wallpaper))
    if "llama" in cases:
        yield from tried(args, "llama", within("llama", bench.llama))
