# SPDX-License-Identifier: Apache-2.0
"""Text beside a compositor on a simulated device: what pacing is worth, without a GPU.

    python -m benchmarks.qos_rhythm [--quick] [--json]

The real gate, cut and parts (pvrd/workers/paced, rhythm, engine/backends/vulkan/segments) before a
device that behaves as submissions recorded on an H200 did (benchmarks/qos_gpu: 8B in 4 bits, 60 Hz,
6.2 ms a frame): seconds are the device's, nothing is waited for. It tells ways of pacing apart; it
is no measurement of a device.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks import common
from engine import meanwhile
from engine.backends.vulkan import segments
from engine.meanwhile import MEANWHILE
from engine.pace import LIMIT
from pvrd.workers import paced
from pvrd.workers.timings import Meter

TOKEN_S, FIRST_S, LAST_S = 3.15e-3, 0.035e-3, 0.145e-3  # a token; a submission; a token's end
BETWEEN_S, SLICE_S = 0.1e-3, 0.42e-3  # the host, between submissions and between slices
TELL_S = 0.12e-3  # of SLICE_S: what is said of tokens
VIDEO_S, EVERY_S = 1.4e-3, 0.04  # a frame on the device, how often
# From its end to the next slice, recorded as one (1.46 ms) and split by what was reckoned: a
# submission is made, it brings the frame to the ring, the frame is looked at and told, a slice.
ISSUE_S, COPY_S, LOOK_S, NEXT_S = 0.11e-3, 0.65e-3, 0.4e-3, 0.3e-3
JITTER_S = 0.4e-3  # of a frame's coming
TOKENS, PARTS = 6, 96  # of a slice; calls of a token
LOCKED_S, TOLD_S = 4.0, 0.5  # from then on it counts; when the refresh is told
HZ, FRAME_S = (60.0, 59.97, 60.02), 6.2e-3


@dataclass
class Device:
    """A compositor's and ours. What is under way when the other one comes goes on for a while, and
    the first of ours after a frame takes longer.
    """

    hz: float
    seed: int
    vary: float  # of a frame's length
    now: float = 0.0
    took: list[tuple[float, float]] = field(default_factory=list)  # begin, seconds of a frame

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._phase, self._number = 1e-3 * self.seed, 0
        self._left = self._begun = self._ended = 0.0
        self._theirs = False
        self._after()

    def _after(self) -> None:
        self._number += 1
        self._next = self._phase + self._number / self.hz + 60e-6 * self._rng.random()

    def _frame(self) -> float:
        r = self._rng.random
        slow = 1 + self.vary * ((self._next / 6) % 2 - 1)
        return FRAME_S * slow * (1 + 0.006 * r()) + (r() < 0.01) * (0.3e-3 + 0.9e-3 * r())

    def _end(self, more: float = 0.0) -> None:
        self.took.append((self._begun, self.now - self._begun + more))
        self._left, self._theirs, self._ended = 0.0, True, self.now

    def idle(self, seconds: float) -> None:
        """Time without work of ours."""
        until = self.now + seconds
        while self.now < until:
            if self._left:
                step = min(self._left, until - self.now)
                self._left -= step
                self.now += step
                if self._left < 1e-9:
                    self._end()
            elif self._next < until:
                self.now = self._begun = max(self.now, self._next)
                self._left = self._frame()
                self._after()
            else:
                self.now = until

    def work(self, seconds: float) -> None:
        """A submission of ours."""
        r = self._rng.random
        if self._left:  # the frame is done first; unless it nearly was, it is disturbed
            near = self._left <= 1.05e-3
            self.now += self._left
            self._end(0.0 if near else 0.9e-3 + 0.3e-3 * r())
            self.now += 0.03e-3
        pause = self.now - self._ended
        if self._theirs:
            self._theirs, pause = False, 0.0
            seconds += 0.17e-3 + 0.06e-3 * r() + (r() < 0.12) * 0.15e-3 * r()
        wakes = next(p for s, p in ((0.25e-3, 0.1), (1.25e-3, 0.35), (2.2e-3, 0.6), (9e9, 0.97))
                     if pause < s)  # fmt: skip
        if pause > 0.1e-3:
            seconds += 0.19e-3 + 0.08e-3 * r() if r() < wakes else 0.06e-3 * r()
        seconds += 0.02e-3 + 0.05e-3 * r() + (r() < 0.05) * 0.15e-3 * r()
        while self._next < self.now + seconds:
            over = self.now + seconds - self._next
            shares = ((0.05e-3, 0.0), (0.3e-3, 0.12), (1e-3, 0.3), (9e9, 1.0))
            self._begun = self._next
            if r() < next(p for s, p in shares if over < s):  # the frame comes first
                ours = 0.9 * min(over, 1.05e-3)
                self.now = self._begun + self._frame() + ours
                self._after()
                self._end()
                self._theirs, seconds = False, over - ours + 0.12e-3
                continue
            self._left = self._frame() + (r() < 0.12) * 1.1e-3  # it goes on, the frame waits
            self._after()
            self.now = self._ended = self._begun + over
            return
        self.now = self._ended = self.now + seconds


@dataclass(frozen=True)
class Ways:
    """What is done with a stream's frames. joined: they are brought to the ring by the submission
    that makes them; beside: what the host has to do for frames and tokens it does while the device
    works; paced: when the next one comes is known.
    """

    joined: bool = True
    beside: bool = True
    paced: bool = True


WAYS = {
    "frames brought alone": Ways(joined=False),
    "the host first": Ways(beside=False),
    "frames at any time": Ways(paced=False),
    "all of these": Ways(False, False, False),
}


class Host:
    """The worker's one thread."""

    def __init__(self, device: Device, beside: bool) -> None:
        self._device, self._beside = device, beside
        self._late: float | None = None  # seconds that it worked during the present submission

    def work(self, seconds: float) -> None:
        """Something that need not be done before the next submission."""
        if self._beside:
            MEANWHILE.add(lambda: self._do(seconds))
        else:
            self._do(seconds)

    def _do(self, seconds: float) -> None:
        if self._late is None:
            self._device.idle(seconds)
        else:
            self._late += seconds

    def submit(self, seconds: float) -> None:
        """A submission that takes so long; what is left to do is done meanwhile."""
        began, self._late = self._device.now, 0.0
        self._device.work(seconds)
        MEANWHILE.run()
        late, self._late = self._late, None
        self._device.idle(max(0.0, late - (self._device.now - began)))


class Executable:
    """What Segments needs of one: a model's token."""

    def __init__(self, device: Device, host: Host) -> None:
        self._device, self._host, self._rng = device, host, random.Random(7)
        self._recorded, self._stack = {"ahead": 0}, None
        self._dispatches = {"ahead": range(PARTS)}
        self.program = SimpleNamespace(sequences=self._dispatches)
        cut = SimpleNamespace(
            commands=lambda stack, count: [(count, i) for i in range(count)], submission=tuple
        )
        self._backend = SimpleNamespace(
            _counters={"dispatches": 0, "submissions": 0}, _device=cut, _submit=self._submit
        )

    def _send(self) -> None:
        pass

    def _submit(self, commands: Any, *_: Any) -> None:
        seconds = sum(TOKEN_S / count + LAST_S * (i == count - 1) for count, i in commands)
        self._device.idle(8e-6)
        self._host.submit(FIRST_S + seconds)
        hiccup = (self._rng.random() < 0.001) * 15e-3 * self._rng.random()
        self._device.idle(10e-6 + BETWEEN_S * (0.7 + 0.6 * self._rng.random()) + hiccup)


def run(
    device: Device, seconds: float, stream: bool, ways: Ways = Ways()
) -> tuple[float, list[float]]:
    """Tokens a second, and the compositor's frames in ms, sorted."""
    rng = random.Random(2)
    clock: Any = SimpleNamespace(
        monotonic=lambda: device.now,
        perf_counter=lambda: device.now,
        sleep=lambda s: device.idle(s + 60e-6 * rng.random()),
    )
    recorded: Any = SimpleNamespace(record=lambda *_: None)
    host, done, moment, due = Host(device, ways.beside), 0, 1.0, 1.0
    with ExitStack() as stack:
        for module, name, value in (
            (paced, "time", clock), (segments, "time", clock), (segments, "api", recorded),
            (meanwhile, "time", clock), (LIMIT, "streams", int(stream)),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, value))
        stack.callback(MEANWHILE.clear)
        gate = Meter().gate
        gate.arrivals.opened("stream")
        cut = paced.Cut(gate, Executable(device, host))
        while device.now < seconds:
            if device.now > TOLD_S and not gate.rhythm.on:
                gate.rhythm.pace(60.0)
            if stream and device.now >= due:
                if ways.paced:
                    gate.arrivals.came("stream", due)
                MEANWHILE.run()
                if ways.joined:
                    gate.run("frame", lambda: host.submit(VIDEO_S + COPY_S))
                else:
                    gate.run("frame", lambda: host.submit(VIDEO_S))
                    device.idle(ISSUE_S)
                    device.work(COPY_S)
                host.work(LOOK_S)
                device.idle(NEXT_S)
                moment += EVERY_S
                due = moment + JITTER_S * rng.random()
                continue
            urgent = lambda at=due: stream and device.now >= at  # noqa: E731
            stats = cut.run(("model",), ["ahead"] * TOKENS, urgent)
            done += (stats.done or 0) if device.now > LOCKED_S else 0
            host.work(TELL_S)
            device.idle((SLICE_S - TELL_S) * (0.7 + 0.6 * rng.random()))
    frames = sorted(1e3 * took for begun, took in device.took if begun > LOCKED_S)
    return done / (device.now - LOCKED_S), frames


def found(runs: int, seconds: float, stream: bool, ways: Ways) -> tuple[float, float]:
    """Means of several runs: tokens a second, the compositor's p99 in ms."""
    made = [
        run(Device(HZ[s % 3], s, (0.0, 0.0, 0.1)[s // 3 % 3]), seconds, stream, ways)
        for s in range(runs)
    ]
    rates = statistics.mean(rate for rate, _ in made)
    return rates, statistics.mean(frames[len(frames) * 99 // 100] for _, frames in made)


def rows(runs: int, seconds: float) -> Iterator[common.Row]:
    """Text and the compositor's p99: against parts that go one by one and up to 4 ms; with a stream
    also against frames that are brought by themselves, the host's work before the next submission,
    moments of frames that nobody knows, and all three.
    """
    for stream in (False, True):
        peers = {}
        for together, name in ((paced.STREAMS_S, "up to 4 ms"), (0.0, "one by one")):
            with mock.patch.object(paced, "TOGETHER_S", together):
                peers[name] = found(runs, seconds, stream, Ways())
        if stream:
            for name, ways in WAYS.items():
                peers[name] = found(runs, seconds, stream, ways)
        rate, p99 = found(runs, seconds, stream, Ways())
        beside = "with a stream" if stream else "text alone"
        for name, peer in peers.items():
            yield common.row(f"{beside}: text", "tokens/s", rate, peer[0], name)
            yield common.row(f"{beside}: frames' p99", "ms", p99, peer[1], name)


def measure(args: argparse.Namespace) -> list[common.Row]:
    return list(rows(3, 8.0) if args.quick else rows(18, 30.0))


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure))
