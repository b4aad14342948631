# SPDX-License-Identifier: Apache-2.0
"""Work for pvrd that a benchmark of good neighbourhood measures in stretches ($PVRD_BUS).

    python -m benchmarks.qos_jobs text --model NAME
    python -m benchmarks.qos_jobs video --model NAME --size WxH --fps F

`text` has pvrd write without an end, the likeliest token each time; `video` submits a frame each
1 / fps seconds with the next frame's moment as its deadline, as a live stream does. Both print
"begun" with the first result, then at each SIGUSR1 what was done since the one before, as a JSON
object, and end at SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.common import ROOT
from benchmarks.qos_clients import PROMPT, Ended

STOP_S = 30.0
CREDIT_S = 0.001  # before a frame's moment: not worth a wait


@dataclass
class Tally:
    """What was done since the last word; `say` prints it and begins anew."""

    counts: dict[str, int] = field(default_factory=dict)
    since: float = 0.0

    def add(self, **more: int) -> None:
        for name, count in more.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def say(self, *_: object) -> None:
        now = time.monotonic()
        print(json.dumps({**self.counts, "seconds": now - self.since}), flush=True)
        self.counts, self.since = {}, now


def told(tally: Tally) -> None:
    """From now on signals are heard."""

    def end(*_: object) -> None:
        raise Ended

    signal.signal(signal.SIGUSR1, tally.say)
    signal.signal(signal.SIGTERM, end)
    tally.counts, tally.since = {}, time.monotonic()
    print("begun", flush=True)


def text(model: str, device: str) -> None:
    """Counts `tokens`."""
    from pvrd.client import Client

    settings = {"device": device, "context": 1024, **({"model": model} if model else {})}
    tally, begun = Tally(), False
    with Client() as client, client.open_text(settings) as session:
        for _ in session.loading():
            pass
        with contextlib.suppress(Ended):
            while True:
                for event in session.generate(PROMPT, {"max_tokens": 900, "temperature": 0.0}):
                    if event["type"] == "token":
                        tally.add(tokens=1)
                    if not begun and event["type"] == "token":
                        told(tally)
                        begun = True


def video(model: str, device: str, size: tuple[int, int], fps: float) -> None:
    """Counts `sent`, `in_time`, `late`, `dropped`, `degraded`, `lower` (made by less than the
    session's own network) and `on_cpu`.
    """
    from pvrd.client import Client

    width, height = size
    settings = {"width": width, "height": height, "model": model, "unchanged": "off"}
    period, tally = 1.0 / fps, Tally()
    with Client() as client, client.open_video({**settings, "device": device}) as session:
        for _ in session.session.loading():
            pass
        noise = np.random.default_rng(1).integers(16, 235, width * height, dtype=np.uint8).tobytes()
        for slot in range(session.slots):
            for pieces in session.input(slot):
                for piece in pieces:
                    piece[:] = noise[: len(piece)]
        free, seq = list(range(session.slots)), 0
        due: dict[int, float] = {}

        def receive(wait_s: float) -> None:
            if not select.select([session], [], [], max(0.0, wait_s))[0]:
                return
            answer = session.receive()
            if answer is None:
                return
            free.append(answer.slot)
            late = time.monotonic() > due.pop(answer.seq)
            tally.add(
                dropped=answer.dropped,
                late=late and not answer.dropped,
                in_time=not (late or answer.dropped),
                degraded=answer.degraded,
                lower=answer.level > 0,
                on_cpu=answer.device == "cpu",
            )

        with contextlib.suppress(Ended):
            while not session.credits:
                receive(1.0)
            session.submit(seq, free.pop())  # the first one builds what is needed
            due[seq] = float("inf")
            while due:
                receive(1.0)
            told(tally)
            moment = time.monotonic()
            while True:
                moment = max(moment + period, time.monotonic() - period)
                while (left := moment - time.monotonic()) > CREDIT_S:
                    receive(left)
                if not (free and session.credits):
                    tally.add(sent=1, dropped=1)  # no slot is free: it would be shown too late
                    continue
                seq += 1
                due[seq] = time.monotonic() + period
                deadline = time.monotonic_ns() + int(period * 1e9)
                session.submit(seq, free.pop(0), 0, deadline)
                tally.add(sent=1)


# -- the benchmark's end


@dataclass
class Job:
    """One of these programs, that has begun."""

    process: subprocess.Popen[str]

    def stretch(self) -> dict[str, float]:
        """What it did since the last call.

        Raises:
            SystemExit: it failed; its own words are on stderr.
        """
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGUSR1)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self.process.args))} failed")  # type: ignore[arg-type]
        found: dict[str, float] = json.loads(line)
        return found


@contextlib.contextmanager
def job(arguments: list[str], env: dict[str, str]) -> Iterator[Job]:
    """Starts one and waits until it has begun."""
    command = [sys.executable, "-m", "benchmarks.qos_jobs", *arguments]
    paths = [str(ROOT), env.get("PYTHONPATH", "")]
    env = {**env, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=Path("/"))
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit(f"{' '.join(arguments)} did not begin")
        yield Job(process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("text", "video"))
    parser.add_argument("--model", default="")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--size", default="1920x1080")
    parser.add_argument("--fps", type=float, default=25.0)
    args = parser.parse_args()
    if args.what == "text":
        text(args.model, args.device)
    else:
        width, height = (int(side) for side in args.size.split("x"))
        video(args.model or "balanced", args.device, (width, height), args.fps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
