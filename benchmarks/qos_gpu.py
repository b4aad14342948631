# SPDX-License-Identifier: Apache-2.0
"""What a compositor that shares the GPU with pvrd loses: the GPU part of benchmarks/qos.

Cases, each with the same frames of benchmarks/qos_compositor (6 ms of the device at 60 Hz, the
number of layers found alone): nobody else; pvrd that writes with a model of an 8B model's shape and
enlarges a 1920x1080 stream to 4K, each frame due when the next one comes; llama.cpp's llama-bench
by Vulkan that decodes with the same file (where PVRD_LLAMA_VULKAN names its folder). Then B5: a
wallpaper that takes 65 % of the device, beside the video alone.

The compositor's missed refreshes and latency go to pvrd once a second through
Manager.ReportCompositor: the benchmark stands for pvr-agent there, since no Wayland compositor is
at work. pvrd's other signal is its own canary.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.qos_jobs import Job, job
from benchmarks.qos_weston import TOOLS
from pvrd.bus import V
from pvrd.client import MANAGER, PATH, Client
from pvrd.errors import PvrdError
from tools import random_gguf

HZ = 60.0
PERIOD_MS = 1000.0 / HZ
BUDGET_MS = 6.0
WALLPAPER = 0.65  # of the device's time
WALLPAPER_FPS = 25.0
TARGET = 1.10  # of the p99 alone
HALF = 0.5  # of the tokens alone
SHAPE = "llama3-8b"
SETTLE_S = 3.0  # after the compositor began: the governor has seen it
LONE_S = 8.0
START_S = 240.0


@dataclass
class Frames:
    """What a run of the compositor comes to."""

    took_ms: list[float]
    missed: int
    seconds: float
    began_s: list[float]  # CLOCK_MONOTONIC
    layers: int
    device: str

    @property
    def p50(self) -> float:
        return statistics.median(self.took_ms)

    @property
    def p99(self) -> float:
        return sorted(self.took_ms)[min(len(self.took_ms) - 1, len(self.took_ms) * 99 // 100)]

    def over(self, limit_ms: float) -> float:
        """Percent of the frames that took longer."""
        return 100 * sum(took > limit_ms for took in self.took_ms) / len(self.took_ms)


@dataclass
class Compositor:
    """The process, calibrated and waiting."""

    process: subprocess.Popen[str]
    layers: int
    device: str
    alone_ms: float

    def frames(self, agent: Client | None = None) -> Frames:
        """Has it draw its frames; what it sees of its refreshes goes to pvrd as it comes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            message = json.loads(line)
            if message["t"] == "report" and agent is not None:
                report(agent, message)
            if message["t"] == "end":
                got = message["took_ms"], message["missed"], message["seconds"], message["began_s"]
                return Frames(*got, self.layers, self.device)
        raise SystemExit("qos_compositor ended before its frames did")


def report(agent: Client, seen: dict[str, Any]) -> None:
    """As pvr-agent does."""
    body = {
        "refresh_hz": V("d", HZ),
        "missed_per_s": V("d", min(HZ, float(seen["missed_per_s"]))),
        "latency_ms": V("d", float(seen["latency_ms"])),
        "compositor": V("s", "benchmarks.qos_compositor"),
        "valid_s": V("d", 5.0),
    }
    with contextlib.suppress(PvrdError):  # Busy: two within a second
        agent.call(PATH, MANAGER, "ReportCompositor", "a{sv}", [body])


@contextlib.contextmanager
def compositor(
    args: argparse.Namespace, budget_ms: float, layers: int = 0, frames: int = 0
) -> Iterator[Compositor]:
    """Starts one; without `layers` it has the GPU for itself now, to find them."""
    command = [sys.executable, "-m", "benchmarks.qos_compositor"]
    command += ["--frames", str(frames or args.frames), "--budget", str(budget_ms)]
    command += ["--hz", str(HZ), "--layers", str(layers)]
    command += ["--software"] if args.software else []
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=common.ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("qos_compositor did not start")
        said = json.loads(line)
        yield Compositor(process, said["layers"], said["device"], said["alone_ms"])
    finally:
        process.terminate()
        process.wait()


# -- pvrd


def model(args: argparse.Namespace, folder: Path) -> Path:
    """A file of random weights, q4_0, in a folder of its own; `--layers` of the shape's layers."""
    kept = os.environ.get("PVRD_QOS_MODELS")
    place = Path(kept) if kept else folder / "models"
    place.mkdir(parents=True, exist_ok=True)
    shape = random_gguf.SHAPES[args.shape]
    layers = args.layers or shape.layers
    name = f"{args.shape}-{layers}"
    random_gguf.SHAPES[name] = dataclasses.replace(shape, layers=layers)
    path = place / f"random-{name}.gguf"
    if not path.exists():
        random_gguf.write(path, name, "q4_0")
    return path


@contextlib.contextmanager
def pvrd(args: argparse.Namespace, folder: Path, models: Path) -> Iterator[dict[str, str]]:
    """A bus and a daemon of its own; the environment of its clients. Its log is pvrd.log."""
    config = folder / "pvrd.toml"
    lines = [f"gpu.allow_software = {'true' if args.software else 'false'}"]
    lines += [f"cpu.threads = {args.threads}", f'models.paths = ["{models}"]', *args.config]
    config.write_text("\n".join(lines) + "\n")
    with TOOLS["bus"](folder) as address:
        arguments = ["--config", str(config)]
        with TOOLS["daemon"](folder, address, arguments, folder / "pvrd.log"):
            try:
                yield {**os.environ, "PVRD_BUS": address, "DBUS_SESSION_BUS_ADDRESS": address}
            except BaseException:
                lines = (folder / "pvrd.log").read_text(errors="replace").splitlines()
                _say("\n".join(lines[-30:]))
                raise


def decisions(folder: Path) -> list[str]:
    """What the governor decided, in its own words."""
    lines = (folder / "pvrd.log").read_text(errors="replace").splitlines()
    return [line for line in lines if "governor:" in line]


# -- llama.cpp


@dataclass
class Llama:
    """llama-bench; `rates` are tokens/s with the moment when each was told."""

    process: subprocess.Popen[str]
    rates: list[tuple[float, float]] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with contextlib.suppress(ValueError, KeyError):
                self.rates.append((time.monotonic(), float(json.loads(line)["avg_ts"])))

    def between(self, begin: float, end: float) -> float:
        """Median of what was told in this time, 0 when that is nothing."""
        found = [rate for at, rate in self.rates if begin <= at <= end]
        return statistics.median(found) if found else 0.0


@contextlib.contextmanager
def llama(args: argparse.Namespace, file: Path) -> Iterator[Llama]:
    """Decodes until the context ends, after three results of it alone."""
    folder = Path(os.environ["PVRD_LLAMA_VULKAN"])
    counts = ",".join(str(n) for n in range(args.llama_tokens, args.llama_tokens + 400))
    command = [str(folder / "llama-bench"), "-m", str(file), "-ngl", "99", "-fa", "1"]
    command += ["-p", "0", "-n", counts, "-r", "1", "-o", "jsonl"]
    env = dict(os.environ)
    if args.software:
        env["GGML_VK_VISIBLE_DEVICES"] = "0"
    env["LD_LIBRARY_PATH"] = f"{folder}:{env.get('LD_LIBRARY_PATH', '')}"
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    process = subprocess.Popen(command, stdin=null, stdout=pipe, stderr=null, text=True, env=env)
    running = Llama(process)
    reader = threading.Thread(target=running.read, daemon=True)
    reader.start()
    try:
        end = time.monotonic() + START_S
        while len(running.rates) < 3:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit("llama-bench does not decode by Vulkan here")
            time.sleep(0.05)
        yield running
    finally:
        process.kill()
        process.wait()
        reader.join()


# -- the cases


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


def stretch(text: Job | None, video: Job | None) -> Beside:
    """What both did since the last time."""
    done = text.stretch() if text else {}
    rate = done.get("tokens", 0) / done["seconds"] if done else 0.0
    return Beside(rate, video.stretch() if video else {})


def measured(
    work: Compositor, agent: Client | None, text: Job | None, video: Job | None
) -> tuple[Frames, Beside]:
    """The frames of a compositor beside pvrd, and what pvrd did meanwhile."""
    stretch(text, video)
    frames = work.frames(agent)
    return frames, stretch(text, video)


def _trace(args: argparse.Namespace, layers: int, env: dict[str, str]) -> None:
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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rows_of(name: str, frames: Frames, alone: Frames, peer: str) -> Iterator[common.Row]:
    yield common.row(f"{name} frame p50", "ms", frames.p50, alone.p50, peer)
    yield common.row(f"{name} frame p99", "ms", frames.p99, alone.p99, peer)
    missed, theirs = float(frames.missed), float(alone.missed)
    unit = f"of {len(frames.took_ms)} frames"
    ratio = theirs / missed if missed else None
    yield common.Row(f"{name} missed refreshes", unit, missed, theirs, peer, ratio)
    limit = TARGET * alone.p99
    yield common.Row(f"{name} frames over target", "%", frames.over(limit), None, "none", None)


def measure(args: argparse.Namespace, folder: Path) -> Iterator[common.Row]:
    """All cases; rows as they come to be known."""
    video_args = ["video", "--size", args.video, "--fps", str(args.fps), "--model", args.tier]
    with compositor(args, BUDGET_MS) as work:
        alone = work.frames()
    _say(f"compositor: {alone.device}, {alone.layers} layers, alone p99 {alone.p99:.2f} ms")
    yield common.row("alone frame p50", "ms", alone.p50, BUDGET_MS, "the budget")
    yield common.row("alone frame p99", "ms", alone.p99, None, "none")
    unit = f"of {len(alone.took_ms)} frames"
    yield common.Row("alone missed refreshes", unit, float(alone.missed), None, "none", None)
    with compositor(args, WALLPAPER * PERIOD_MS, 0, args.frames // 3) as work:
        wallpaper = work.frames()
    began = time.monotonic()
    file = model(args, folder)
    _say(f"{file.name} is written, {time.monotonic() - began:.0f} s")
    with contextlib.ExitStack() as stack:
        env = stack.enter_context(pvrd(args, folder, file.parent))
        agent = stack.enter_context(Client(env["PVRD_BUS"]))
        began = time.monotonic()
        with contextlib.ExitStack() as jobs:
            text = jobs.enter_context(job(["text", "--model", file.stem], env))
            _say(f"pvrd writes, after {time.monotonic() - began:.0f} s")
            time.sleep(0.3 * args.lone)
            stretch(text, None)
            time.sleep(args.lone)
            only = stretch(text, None)
            _say(f"lone text: {only.tokens_s:.1f} tokens/s")
            video = jobs.enter_context(job(video_args, env))
            time.sleep(0.5 * args.lone)
            stretch(text, video)
            time.sleep(args.lone)
            both = stretch(text, video)
            _say(f"text and video: {both.tokens_s:.1f} tokens/s, {both.video}")
            with compositor(args, BUDGET_MS, alone.layers, int(SETTLE_S * HZ)) as first:
                first.frames(agent)
            with compositor(args, BUDGET_MS, alone.layers) as work:
                beside, got = measured(work, agent, text, video)
            _say(f"beside the compositor: {got.tokens_s:.1f} tokens/s, {got.video}")
            with compositor(args, BUDGET_MS, alone.layers, max(60, args.frames // 3)) as work:
                blind, unled = measured(work, None, text, video)
            blind.took_ms = blind.took_ms[len(blind.took_ms) // 3 :]
            _say(f"without reports: {unled.tokens_s:.1f} tokens/s, p99 {blind.p99:.2f} ms")
            if args.trace:
                _trace(args, alone.layers, env)
        yield from _rows_of("pvrd", beside, alone, "alone")
        yield common.row("pvrd frame p99", "ms", beside.p99, TARGET * alone.p99, "target")
        yield common.row("pvrd text", "tokens/s", got.tokens_s, HALF * only.tokens_s, "target")
        yield common.row("pvrd text", "tokens/s", got.tokens_s, only.tokens_s, "lone")
        yield common.row("pvrd text", "tokens/s", got.tokens_s, both.tokens_s, "lone with video")
        yield common.row("pvrd video in time", "%", got.in_time, both.in_time, "no compositor")
        yield common.row("pvrd video in time, own network", "%", got.own, both.own, "no compositor")
        yield common.row("pvrd without reports, frame p99", "ms", blind.p99, alone.p99, "alone")
        wall_args = [*video_args[:3], "--fps", str(WALLPAPER_FPS), *video_args[5:]]
        with contextlib.ExitStack() as jobs:
            video = jobs.enter_context(job(wall_args, env))
            frames = args.frames // 3
            budget = WALLPAPER * PERIOD_MS
            with compositor(args, budget, wallpaper.layers, int(SETTLE_S * HZ)) as first:
                first.frames(agent)
            with compositor(args, budget, wallpaper.layers, frames) as work:
                busy, shown = measured(work, agent, None, video)
            _say(f"beside the wallpaper: {shown.video}")
        rate = shown.video.get("in_time", 0) / shown.video["seconds"]
        yield common.row("65 % wallpaper, 4K", "frames/s", rate, WALLPAPER_FPS, "target")
        yield common.Row("65 % wallpaper, own network", "%", shown.own, None, "none", None)
        yield from _rows_of("65 % wallpaper", busy, wallpaper, "alone")
    for line in decisions(folder):
        _say(f"  {line}")
    if os.environ.get("PVRD_LLAMA_VULKAN"):
        try:
            yield from _llama_rows(args, file, alone, beside)
        except SystemExit as none:  # the other rows stand without it
            _say(str(none))


def _llama_rows(
    args: argparse.Namespace, file: Path, alone: Frames, ours: Frames
) -> Iterator[common.Row]:
    with llama(args, file) as other, compositor(args, BUDGET_MS, alone.layers) as work:
        begin = time.monotonic()
        lone = statistics.median(rate for _, rate in other.rates[:3])
        frames = work.frames()
        rate = other.between(begin + 1.0, time.monotonic())
    yield from _rows_of("llama.cpp", frames, alone, "alone")
    yield common.row("llama.cpp text", "tokens/s", rate, lone, "lone")
    yield common.row("pvrd frame p99", "ms", ours.p99, frames.p99, "llama.cpp")
