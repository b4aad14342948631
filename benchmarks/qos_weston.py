# SPDX-License-Identifier: Apache-2.0
"""What a desktop beside pvrd's CPU path loses: Weston without a screen and an animated window.

    python -m benchmarks.qos_weston [--quick] [--json] [--threads N] [--rounds N] [--llama]

The window draws 1024 x 600 pixels whenever the compositor asks, alone, beside pvrd that writes a
text and enlarges a video (device cpu, pvr-agent running), and beside a program that takes as many
threads at normal priority: llama.cpp's llama-bench with the same model where it is built (--llama
builds it), else threads that only count. Cases take turns; each round's figures go to stderr. Rows:
`window NAME` has pvrd against `alone` and against the other program; the medians of all rounds.

    frames         frames of the window that were presented, a second
    missed         refreshes without a new frame, a second (smaller is better)
    latency        commit to presentation, median and p99
    longest        between two frames that were shown

Weston without a screen has no counter of refreshes (seq is 0) and no fixed raster: a frame is
"presented" 16 ms after it was drawn, so that alone it shows 1 / (16 ms + drawing) frames a second
and not 60, and a refresh is missed where a gap reaches 1.75 intervals. What is compared is one
compositor with itself.

`work` rows are what pvrd got done beside the window, against itself without one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import common, peers
from benchmarks.qos_clients import Program, Shown, program, shown, weston
from benchmarks.text_cpu import smollm2

WINDOW = "1024x600"
VIDEO = "480x270"
TOOLS = runpy.run_path(str(common.ROOT / "tools/with-pvrd"))
Case = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def pvrd(folder: Path, gpu: bool, threads: int) -> Iterator[dict[str, str]]:
    """A bus and a daemon of its own; the environment of its clients."""
    folder.mkdir()
    config = folder / "pvrd.toml"
    device = "enabled = true\nallow_software = true" if gpu else "enabled = false"
    config.write_text(f"[gpu]\n{device}\n[cpu]\nthreads = {threads}\n")
    with TOOLS["bus"](folder) as address:
        arguments = ["--config", str(config)]
        with TOOLS["daemon"](folder, address, arguments, folder / "pvrd.log"):
            yield {**os.environ, "PVRD_BUS": address, "DBUS_SESSION_BUS_ADDRESS": address}


@contextlib.contextmanager
def working(env: dict[str, str], device: str = "cpu") -> Iterator[list[Program]]:
    """A text and a video under way; their results can be had once it ends."""
    both = [
        program(["text", "--device", device], env),
        program(["video", "--device", device, "--size", VIDEO], env),
    ]
    try:
        for each in both:
            each.works()
        yield both
    finally:
        for each in both:
            each.process.terminate()
        for each in both:
            each.process.wait()


@contextlib.contextmanager
def other(env: dict[str, str], threads: int, llama: Path | None) -> Iterator[None]:
    """The other program."""
    if llama is None:
        spinning = program(["spin", "--threads", str(threads)], env)
        spinning.works()
        try:
            yield
        finally:
            spinning.result()
        return
    command = [str(llama / "llama-bench"), "-m", str(smollm2()), "-t", str(threads)]
    command += ["-p", "0", "-n", "512", "-r", "1000"]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=null, stderr=null, start_new_session=True)
    try:
        time.sleep(1.0)  # it loads
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def rates(both: list[Program]) -> tuple[float, float]:
    """Tokens and frames a second."""
    found = [each.result() for each in both]
    return found[0]["done"] / found[0]["seconds"], found[1]["done"] / found[1]["seconds"]


def window(env: dict[str, str], seconds: float) -> Shown:
    """One run of the window."""
    run = program(["desktop", "--seconds", str(seconds), "--size", WINDOW], env)
    return shown(run.result(stop=False))


def beside(args: argparse.Namespace, folder: Path) -> Iterator[common.Row]:
    """The three cases in turn."""
    llama = _llama(args)
    seconds, rounds = (3.0, 1) if args.quick else (10.0, args.rounds)
    found: dict[str, list[Shown]] = {"alone": [], "pvrd": [], "other": []}
    with_window: list[tuple[float, float]] = []
    without: list[tuple[float, float]] = []
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(pvrd(folder / "cpu", False, args.threads))
        (folder / "weston").mkdir()
        screen = stack.enter_context(weston(folder / "weston"))
        agent = [sys.executable, "-m", "pvrd.agent", "--window", "--bus", ours["PVRD_BUS"]]
        watching = subprocess.Popen(agent, env={**screen, **ours, **_of(screen)})
        stack.callback(watching.wait)
        stack.callback(watching.terminate)
        for _ in range(rounds):
            found["alone"].append(window(screen, seconds))
            with working(ours) as both:
                found["pvrd"].append(window(screen, seconds))
                with_window.append(rates(both))
            with other(screen, args.threads, llama):
                found["other"].append(window(screen, seconds))
            with working(ours) as both:
                time.sleep(seconds)
                without.append(rates(both))
            _tell(found, with_window[-1], without[-1])
    name = "llama.cpp" if llama else f"{args.threads} busy threads"
    yield from _rows(found, "alone", "alone")
    yield from _rows(found, "other", name)
    for i, (what, unit) in enumerate((("text", "tokens/s"), ("video", "frames/s"))):
        pair = [statistics.median(r[i] for r in runs) for runs in (with_window, without)]
        yield common.row(f"work {what} beside the window", unit, pair[0], pair[1], "no window")


def _tell(
    found: dict[str, list[Shown]], beside: tuple[float, float], alone: tuple[float, float]
) -> None:
    """A round's figures: of each run, not of the best."""
    for case, runs in found.items():
        one = runs[-1]
        frames = f"{one.per_s:.1f} frames/s, {one.missed_per_s:.1f} missed"
        delays = f"latency {one.latency_ms:.1f} and {one.latency_p99_ms:.1f} ms"
        longest = f"longest {one.longest_ms:.0f} ms"
        print(f"{case}: {frames}, {delays}, {longest}", file=sys.stderr)
    work = ", ".join(f"{a:.1f} and {b:.1f}" for a, b in zip(beside, alone, strict=True))
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"work beside the window and without: {work}; {load}", file=sys.stderr, flush=True)


def _of(screen: dict[str, str]) -> dict[str, str]:
    return {key: screen[key] for key in ("XDG_RUNTIME_DIR", "WAYLAND_DISPLAY")}


def _llama(args: argparse.Namespace) -> Path | None:
    """Where llama.cpp is built; built now when that is asked for."""
    if args.llama:
        return peers.llama_cpp()
    built = peers.cache() / f"llama-cpp-python-{peers.LLAMA_VERSION}/build/bin"
    return built if (built / "llama-bench").exists() else None


def _rows(found: dict[str, list[Shown]], peer: str, name: str) -> Iterator[common.Row]:
    def middle(case: str, field: str) -> float:
        return statistics.median(getattr(one, field) for one in found[case])

    for label, field, unit in (
        ("frames", "per_s", "frames/s"),
        ("missed", "missed_per_s", "refreshes/s"),
        ("latency", "latency_ms", "ms"),
        ("latency p99", "latency_p99_ms", "ms"),
        ("longest", "longest_ms", "ms"),
    ):
        ours, theirs = middle("pvrd", field), middle(peer, field)
        if label == "missed":
            ratio = theirs / ours if ours else None
            yield common.Row(f"window {label}", unit, ours, theirs, name, ratio)
        else:
            yield common.row(f"window {label}", unit, ours, theirs, name)


def measure(args: argparse.Namespace) -> list[common.Row]:
    with tempfile.TemporaryDirectory(prefix="qos-") as name:
        return list(beside(args, Path(name)))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="of all cases (5)")
    parser.add_argument("--llama", action="store_true", help="builds llama.cpp where it is missing")


def facts() -> dict[str, str]:
    said = subprocess.run(["weston", "--version"], capture_output=True, text=True, check=True)
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    return {"compositor": f"{said.stdout.strip()}, headless, pixman", "load average": load}


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure, options, facts))
