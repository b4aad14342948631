# SPDX-License-Identifier: Apache-2.0
"""The programs of benchmarks/qos_gpu: its compositor, pvrd with a model, llama.cpp."""

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.qos_weston import TOOLS
from pvrd.bus_values import V
from pvrd.client import MANAGER, PATH, Client
from pvrd.errors import PvrdError
from tools import random_gguf

HZ = 60.0
START_S = 240.0


def say(text: str) -> None:
    """At once, beside the table."""
    print(text, file=sys.stderr, flush=True)


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
    def missed_of_1000(self) -> float:
        """Refreshes without a new frame."""
        return 1000 * self.missed / max(1, len(self.took_ms))

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

    def frames(
        self, agent: Client | None = None, begins: Callable[[], object] = lambda: None
    ) -> Frames:
        """Has it draw its frames; what it sees of its refreshes goes to pvrd as it comes. begins:
        called when those that count begin.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            message = json.loads(line)
            if message["t"] == "report" and agent is not None:
                report(agent, message)
            if message["t"] == "begin":
                begins()
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
    args: argparse.Namespace, budget_ms: float, layers: int = 0, frames: int = 0, settle: int = 0
) -> Iterator[Compositor]:
    """Starts one; without `layers` it has the GPU for itself now, to find them. So many frames to
    `settle` are drawn before those that count.
    """
    command = [sys.executable, "-m", "benchmarks.qos_compositor"]
    command += ["--frames", str(frames or args.frames), "--budget", str(budget_ms)]
    command += ["--hz", str(HZ), "--layers", str(layers), "--settle", str(settle)]
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
    """A bus and a daemon of its own in a new folder; the environment of its clients. Its log is
    pvrd.log there.
    """
    folder.mkdir()
    config = folder / "pvrd.toml"
    lines = [f"gpu.allow_software = {'true' if args.software else 'false'}"]
    if args.software:
        lines.append(f"cpu.threads = {args.threads}")
    lines += [f'models.paths = ["{models}"]', *args.config]
    config.write_text("\n".join(lines) + "\n")
    with TOOLS["bus"](folder) as address:
        arguments = ["--config", str(config)]
        with TOOLS["daemon"](folder, address, arguments, folder / "pvrd.log"):
            try:
                yield {**os.environ, "PVRD_BUS": address, "DBUS_SESSION_BUS_ADDRESS": address}
            except BaseException:
                lines = (folder / "pvrd.log").read_text(errors="replace").splitlines()
                say("\n".join(lines[-30:]))
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
