# SPDX-License-Identifier: Apache-2.0
"""Eight video streams at once against one, through a daemon of their own.

Rows: `fast 640x360 8 streams`, frames a second of all together against one alone, as fast as they
go, in turn; `... CPU`, what a frame takes of the CPU's time then, in pvrd, its workers and the
client, which other work on the machine hardly changes; `... p99`, the 99th percentile of the time
from a frame's submission to its return, against its deadline, when the streams together offer four
fifths of what one alone got.
"""

from __future__ import annotations

import argparse
import itertools
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import common, nsr_export
from pvrd.client import Client
from pvrd.client_video import VideoSession
from tests.daemons import Daemon

WIDTH, HEIGHT, STREAMS = 640, 360, 8
SLOTS, SECONDS, LOAD = 3, 4.0, 0.8
ROUNDS = 5  # of one stream, then of all
PERIODS = 2  # of a stream, until the deadline


class Stream:
    """A session and the frames of it that are under way."""

    def __init__(self, video: VideoSession) -> None:
        self.video = video
        self.free = list(range(video.slots))
        self.sent: dict[int, float] = {}
        self.numbers = itertools.count()
        for slot in self.free:
            for number, plane in enumerate(video.input(slot)):
                for piece in plane:
                    piece[:] = bytes(64 + 8 * slot + number for _ in range(len(piece)))

    def submit(self, allowed_s: float = 0.0) -> bool:
        """Hands a frame over, if there is a slot and a credit for it."""
        if not (self.free and self.video.credits):
            return False
        seq, now = next(self.numbers), time.monotonic_ns()
        self.sent[seq] = now * 1e-9
        self.video.submit(seq, self.free.pop(0), 0, now + int(allowed_s * 1e9) if allowed_s else 0)
        return True

    def receive(self) -> float | None:
        """Seconds that a frame took, when one came back in time."""
        message = self.video.receive()
        if message is None:
            return None
        self.free.append(message.slot)
        took = time.monotonic() - self.sent.pop(message.seq)
        return float("inf") if message.dropped else took


@contextmanager
def opened(client: Client, model: str, count: int) -> Iterator[list[Stream]]:
    """So many sessions, each after its first frames: every slot was used, and tiles that always
    change are known to.
    """
    with ExitStack() as stack:
        settings = {"width": WIDTH, "height": HEIGHT, "model": model, "slots": SLOTS}
        streams = [Stream(stack.enter_context(client.open_video(settings))) for _ in range(count)]
        for stream in streams:
            while not stream.submit():
                stream.receive()
            for _ in range(2 * SLOTS):
                while stream.submit():
                    pass
                stream.receive()
            while stream.sent:
                stream.receive()
        yield streams


def receive_all(streams: list[Stream], wait_s: float) -> list[float]:
    """What comes back within `wait_s`."""
    ready, _, _ = select.select([s.video for s in streams], [], [], max(0.0, wait_s))
    mine = {s.video.fileno(): s for s in streams}
    found = [mine[video.fileno()].receive() for video in ready]
    return [took for took in found if took is not None]


def rate(streams: list[Stream], seconds: float) -> float:
    """Frames a second of all together, as fast as they go."""
    begin, count = time.monotonic(), 0
    while time.monotonic() < begin + seconds:
        for stream in streams:
            while stream.submit():
                pass
        count += len(receive_all(streams, 1.0))
    while any(s.sent for s in streams):
        count += len(receive_all(streams, 1.0))
    return count / (time.monotonic() - begin)


def paced(streams: list[Stream], period: float, seconds: float) -> list[float]:
    """Seconds of each frame, when each stream offers one every `period`; inf: dropped."""
    begin = time.monotonic()
    due = [begin + period * i / len(streams) for i in range(len(streams))]
    took: list[float] = []
    while (now := time.monotonic()) < begin + seconds:
        for i, stream in enumerate(streams):
            if due[i] <= now and stream.submit(PERIODS * period):
                due[i] += period
        took += receive_all(streams, min(due) - now)
    while any(s.sent for s in streams):
        took += receive_all(streams, 1.0)
    return took


def spent(daemon: Daemon) -> float:
    """Seconds of the CPU that pvrd, its workers and this process took until now."""
    pvrd = psutil.Process(daemon.process.pid)
    times = [process.cpu_times() for process in (pvrd, *pvrd.children(recursive=True))]
    return sum(t.user + t.system for t in times) + time.process_time()


@dataclass
class Fast:
    """So many streams as fast as they go, round by round: frames a second, and milliseconds of the
    CPU a frame.
    """

    daemon: Daemon
    count: int
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def round(self, streams: list[Stream], seconds: float) -> None:
        """Takes one more into account."""
        before, began = spent(self.daemon), time.monotonic()
        self.rates.append(rate(streams, seconds))
        frames = self.rates[-1] * (time.monotonic() - began)
        self.cpu_ms.append(1e3 * (spent(self.daemon) - before) / frames)


def measure(args: argparse.Namespace) -> list[common.Row]:
    """The rows for the fast tier."""
    model = nsr_export.shipped("fast")
    name = f"fast {WIDTH}x{HEIGHT} {STREAMS} streams"
    seconds = SECONDS / 4 if args.quick else SECONDS
    config = {"cpu.threads": args.threads, "gpu.enabled": args.device == "gpu"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        daemon = stack.enter_context(Daemon(Path(folder), model.parent, config))
        client = stack.enter_context(daemon.client())
        daemon.ready(client, args.device)
        one, together = Fast(daemon, 1), Fast(daemon, STREAMS)
        for _, fast in itertools.product(range(ROUNDS), (one, together)):
            with opened(client, model.stem, fast.count) as streams:
                fast.round(streams, seconds / ROUNDS)
        alone = statistics.median(one.rates)
        with opened(client, model.stem, STREAMS) as streams:
            period = STREAMS / (LOAD * alone)
            took = sorted(paced(streams, period, seconds))
    ours_ms, alone_ms = (statistics.median(fast.cpu_ms) for fast in (together, one))
    p99 = 1e3 * took[min(len(took) - 1, len(took) * 99 // 100)]
    deadline = 1e3 * PERIODS * period
    return [
        common.row(name, "frames/s", statistics.median(together.rates), alone, "one stream"),
        common.row(f"{name} CPU", "ms a frame", ours_ms, alone_ms, "one stream"),
        common.row(f"{name} p99", "ms a frame", p99, deadline, "its deadline"),
    ]


def options(parser: argparse.ArgumentParser) -> None:
    """Beside those of all benchmarks."""
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").partition("\n")[0], measure, options))
