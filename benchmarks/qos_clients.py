# SPDX-License-Identifier: Apache-2.0
"""Programs that a benchmark of good neighbourhood starts beside pvrd, and the compositor for them.

    python -m benchmarks.qos_clients desktop --seconds S [--size WxH]   an animated window
    python -m benchmarks.qos_clients text|video --device cpu|gpu        work for pvrd ($PVRD_BUS)
    python -m benchmarks.qos_clients spin --threads N                   threads that only count

Each prints one JSON object when it ends; text, video and spin do so at SIGTERM. `desktop` draws a
frame whenever the compositor asks for one (wl_surface.frame), as animations do, and says of each
when it was committed and presented (wp_presentation).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT
from pvrd.agent import protocol
from pvrd.agent.measure import NEAR
from pvrd.agent.wire import NEW, Proxy, Wire, socket_path

START_S = 60.0
BUFFERS = 3
PROMPT = "Once upon a time there was a small computer that"


# -- the compositor

WESTON_INI = """[core]
# Its whole refresh for drawing: without a screen Weston else shows 40 frames/s of its 60.
repaint-window=16
idle-time=0
[shell]
animation=none
locking=false
panel-position=none
"""


@contextlib.contextmanager
def weston(folder: Path) -> Iterator[dict[str, str]]:
    """Weston without a screen, drawing on the CPU; the environment of its clients.

    Raises:
        SystemExit: it is not installed, or does not start.
    """
    folder.chmod(0o700)
    (folder / "weston.ini").write_text(WESTON_INI)
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "WAYLAND_DISPLAY": "wayland-q"}
    try:
        said = subprocess.run(["weston", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit("weston is missing: apt-get install weston") from None
    version = re.search(r"(\d+)\.", said.stdout)
    pixman = "--renderer=pixman" if version and int(version[1]) >= 12 else "--use-pixman"
    command = ["weston", "--backend=headless-backend.so", pixman, "--width=1280", "--height=720"]
    command += [f"--config={folder}/weston.ini", "--socket=wayland-q"]
    with (folder / "weston.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + START_S
        while not (folder / "wayland-q").exists():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"weston did not start: {(folder / 'weston.log').read_text()}")
            time.sleep(0.02)
        yield env
    finally:
        process.terminate()
        process.wait()


# -- programs beside it


@dataclass
class Program:
    """A program of this module that runs."""

    process: subprocess.Popen[str]

    def result(self, stop: bool = True) -> dict[str, Any]:
        """Its JSON object; it is asked to end before, unless it does so by itself.

        Raises:
            SystemExit: it failed; its own words are on stderr.
        """
        if stop and self.process.poll() is None:
            self.process.terminate()
        out, _ = self.process.communicate(timeout=START_S)
        if self.process.returncode:
            raise SystemExit(f"{' '.join(map(str, self.process.args))} failed")  # type: ignore[arg-type]
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return found

    def works(self) -> None:
        """Waits for its first line: it has begun."""
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise SystemExit(f"{self.process.args} did not begin")


def program(arguments: Sequence[str], env: dict[str, str]) -> Program:
    """Starts one."""
    command = [sys.executable, "-m", "benchmarks.qos_clients", *arguments]
    # Each in a session of its own, as programs of a desktop are to the kernel's scheduler: it
    # shares time between sessions (autogroup) before it does within one.
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    return Program(process)


# -- the animated window


class Window:
    """A window whose every frame is another; draws in shared memory."""

    def __init__(self, wire: Wire, width: int, height: int) -> None:
        self.wire = wire
        self.width, self.height = width, height
        self.frames: list[tuple[int, int, int, int]] = []  # committed, presented, refresh, seq
        self.discarded = 0
        self.clock = -1
        self._globals: dict[str, Proxy] = {}
        self._free: list[tuple[Proxy, Any]] = []
        self._asked = False
        self._number = 0
        ramp = np.add.outer(np.arange(height, dtype=np.uint32), np.arange(width, dtype=np.uint32))
        self._ramp = ramp.astype(np.uint32)

    async def open(self) -> None:
        wire = self.wire
        registry = wire.display.make("get_registry", protocol.REGISTRY, NEW)

        def found(name: int, interface: str, version: int) -> None:
            wanted = protocol.GLOBALS.get(interface)
            if wanted is not None:
                bound = registry.make("bind", wanted, name, interface, 1, NEW)
                self._globals[interface] = bound
                if interface == "wp_presentation":
                    bound.on["clock_id"] = lambda clock: setattr(self, "clock", clock)
                elif interface == "xdg_wm_base":
                    bound.on["ping"] = lambda serial: bound("pong", serial)

        registry.on["global"] = found
        await wire.roundtrip(START_S)
        await wire.roundtrip(START_S)
        self.surface = self._globals["wl_compositor"].make("create_surface", protocol.SURFACE, NEW)
        shell = self._globals["xdg_wm_base"].make(
            "get_xdg_surface", protocol.XDG_SURFACE, NEW, self.surface
        )
        top = shell.make("get_toplevel", protocol.TOPLEVEL, NEW)
        top("set_title", "benchmark")
        configured: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def configure(serial: int) -> None:
            shell("ack_configure", serial)
            if not configured.done():
                configured.set_result(None)

        shell.on["configure"] = configure
        self.surface("commit")
        await wire.first(configured, START_S)
        self._memory()

    def _memory(self) -> None:
        size = 4 * self.width * self.height
        memory = os.memfd_create("qos", os.MFD_CLOEXEC)
        os.ftruncate(memory, size * BUFFERS)
        pool = self._globals["wl_shm"].make(
            "create_pool", protocol.SHM_POOL, NEW, memory, size * BUFFERS
        )
        for i in range(BUFFERS):
            buffer = pool.make(
                "create_buffer", protocol.BUFFER, NEW,
                i * size, self.width, self.height, 4 * self.width, 1,
            )  # fmt: skip
            view = np.memmap(
                f"/proc/self/fd/{memory}", np.uint32, "r+", i * size, (self.height, self.width)
            )
            buffer.on["release"] = lambda b=buffer, v=view: self._released(b, v)
            self._free.append((buffer, view))

    def _released(self, buffer: Proxy, view: Any) -> None:
        self._free.append((buffer, view))
        if self._asked:
            self.draw()

    def draw(self) -> None:
        """One frame; asks for the next."""
        self._asked = not self._free
        if self._asked:
            return  # the compositor holds all: the next release draws
        buffer, view = self._free.pop(0)
        self._number += 7
        np.multiply(self._ramp, np.uint32(0x010305), out=view)
        np.add(view, np.uint32(self._number), out=view)
        callback = self.surface.make("frame", protocol.CALLBACK, NEW)
        callback.on["done"] = lambda _: self.draw()
        feedback = self._globals["wp_presentation"].make(
            "feedback", protocol.FEEDBACK, self.surface, NEW
        )
        self.surface("attach", buffer, 0, 0)
        self.surface("damage", 0, 0, self.width, self.height)
        self.surface("commit")
        committed = time.clock_gettime_ns(self.clock)

        def presented(hi: int, lo: int, ns: int, refresh: int, shi: int, slo: int, _: int) -> None:
            at = (hi << 32 | lo) * 1_000_000_000 + ns
            self.frames.append((committed, at, refresh, shi << 32 | slo))

        def discarded() -> None:
            self.discarded += 1

        feedback.on.update(presented=presented, discarded=discarded)


async def desktop(seconds: float, width: int, height: int) -> dict[str, Any]:
    """Draws for so long; all frames, and when that was (ns of the presentation clock)."""
    wire = await Wire.connect(socket_path())
    window = Window(wire, width, height)
    await window.open()
    window.draw()
    await asyncio.sleep(0.5)  # the compositor maps it, the first frames are of that
    begin = time.clock_gettime_ns(window.clock)
    await asyncio.sleep(seconds)
    end = time.clock_gettime_ns(window.clock)
    if wire.lost.done():
        raise SystemExit(str(wire.lost.result()))
    wire.close()
    return {"begin": begin, "end": end, "frames": window.frames, "discarded": window.discarded}


@dataclass(frozen=True)
class Shown:
    """What a run of `desktop` comes to."""

    per_s: float  # frames presented a second
    missed_per_s: float  # refreshes without a new frame, a second
    latency_ms: float  # median from commit to presentation
    latency_p99_ms: float
    longest_ms: float  # between two frames that were shown


def shown(result: dict[str, Any]) -> Shown:
    """Figures of one run.

    Raises:
        SystemExit: the compositor presented next to nothing, or tells no refresh interval.
    """
    begin, end = result["begin"], result["end"]
    frames = [frame for frame in result["frames"] if begin <= frame[1] <= end]
    told = [refresh for _, _, refresh, _ in frames if refresh]
    if len(frames) < 3 or not told:
        raise SystemExit(f"the compositor presented {len(frames)} frames, {len(told)} with times")
    refresh, seconds = statistics.median(told), (end - begin) / 1e9
    times = [begin, *(at for _, at, _, _ in frames), end]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    missed = sum(max(0, int(gap / refresh + NEAR) - 1) for gap in gaps)
    delays = sorted(at - committed for committed, at, _, _ in frames)
    return Shown(
        len(frames) / seconds,
        missed / seconds,
        statistics.median(delays) / 1e6,
        delays[min(len(delays) - 1, len(delays) * 99 // 100)] / 1e6,
        max(gaps) / 1e6,
    )


# -- load


class Ended(Exception):
    """SIGTERM."""


def until_told(work: Callable[[list[int]], None]) -> dict[str, Any]:
    """Runs work(done) until SIGTERM; done[0] counts. The first line of output is "begun"."""

    def end(*_: object) -> None:
        raise Ended

    done = [0]
    signal.signal(signal.SIGTERM, end)
    begin = time.monotonic()
    with contextlib.suppress(Ended):
        work(done)
    return {"done": done[0], "seconds": time.monotonic() - begin}


def text(device: str) -> dict[str, Any]:
    """Has pvrd write; counts tokens from the first one on."""
    from pvrd.client import Client

    with Client() as client, client.open_text({"device": device, "context": 1024}) as session:
        for _ in session.loading():
            pass

        def write(done: list[int]) -> None:
            settings = {"max_tokens": 900, "temperature": 1.0, "seed": 1}
            print("begun", flush=True)
            while True:
                for event in session.generate(PROMPT, settings):
                    done[0] += event["type"] == "token"

        return until_told(write)


def video(device: str, size: tuple[int, int]) -> dict[str, Any]:
    """Has pvrd enlarge as many frames as it takes; counts those that came back."""
    from pvrd.client import Client

    width, height = size
    options = {"width": width, "height": height, "device": device, "model": "fast"}
    with Client() as client, client.open_video({**options, "unchanged": "off"}) as session:
        for _ in session.session.loading():
            pass
        free, seq = list(range(session.slots)), 0
        noise = np.random.default_rng(1).integers(16, 235, width * height, dtype=np.uint8).tobytes()
        for slot in free:
            for pieces in session.input(slot):
                for piece in pieces:
                    piece[:] = noise[: len(piece)]

        def enlarge(done: list[int]) -> None:
            nonlocal seq
            print("begun", flush=True)
            while True:
                while free and session.credits:
                    session.submit(seq, free.pop())
                    seq += 1
                answer = session.receive()
                if answer is not None:
                    free.append(answer.slot)
                    done[0] += not answer.dropped

        return until_told(enlarge)


def spin(threads: int) -> dict[str, Any]:
    """Keeps so many processors busy at normal priority, with nothing."""
    children = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(threads)
    ]

    def wait(_: list[int]) -> None:
        print("begun", flush=True)
        while True:
            signal.pause()

    try:
        return until_told(wait)
    finally:
        for child in children:
            child.kill()
            child.wait()


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("desktop", "text", "video", "spin"))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--size", default="640x360")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    width, height = (int(side) for side in args.size.split("x"))
    if args.what == "desktop":
        result = asyncio.run(desktop(args.seconds, width, height))
    elif args.what == "text":
        result = text(args.device)
    elif args.what == "video":
        result = video(args.device, (width, height))
    else:
        result = spin(args.threads)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
