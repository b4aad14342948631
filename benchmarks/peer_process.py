# SPDX-License-Identifier: Apache-2.0
"""A peer on the CPU beside us: a process for each of its ways that keeps the model loaded, so that
runs can be interleaved without a load between them, and that tells its own CPU time.

Such a process answers to each line `prefill N` or `decode N` on stdin with its seconds by the clock
on the wall and on CPUs.
"""

from __future__ import annotations

import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

CLOCKS = ("wall", "cpu")
Way = TypeVar("Way")  # how a peer runs: a dataclass with an order

# What a peer keeps in its own memory is in large pages where Linux has some for who asks, as our
# compiled models are.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

_PROBE = {"decode": 8, "prefill": 64}  # tokens by which ways are compared
_FIRST = 4  # tokens of a first run: pages, threads, caches


@dataclass(frozen=True)
class Took:
    """Seconds of a run by the clock on the wall, and those of all its threads on CPUs.

    On a machine that others load too, only the second says what the program itself needs. A thread
    that waits for another by spinning counts in it.
    """

    wall: float
    cpu: float

    def by(self, clock: str) -> float:
        """Seconds by one of CLOCKS."""
        return self.cpu if clock == "cpu" else self.wall


class Stopwatch:
    """Times a block of this process: `took` is there behind it."""

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        wall, cpu = self._began
        self.took = Took(time.perf_counter() - wall, time.process_time() - cpu)


class Process:
    """A peer in one way. `ended` makes the error for a line at which the program ended."""

    def __init__(
        self,
        command: Sequence[str],
        ended: Callable[[str], BaseException],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        pipe = subprocess.PIPE
        self._ended = ended
        self._child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=env, cwd=cwd
        )

    def run(self, kind: str, count: int) -> Took:
        """One run. Raises what `ended` makes where the program ended."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        line = f"{kind} {count}"
        try:
            self._child.stdin.write(f"{line}\n")
            self._child.stdin.flush()
            return Took(*map(float, self._child.stdout.readline().split()))
        except (OSError, TypeError, ValueError):
            raise self._ended(line) from None

    def close(self) -> None:
        """Waits for its end."""
        try:
            self._child.communicate()
        except OSError:  # it ended before it read all
            self._child.wait()


class Peer(ABC, Generic[Way]):
    """A peer with one model. Each phase (`decode32`, `prefill128`, …) is run in the way that was
    the fastest at a short one of its kind, the model loaded once for a way that is in use.
    """

    def __init__(self, clock: str, ways: Sequence[Way]) -> None:
        self._clock, self._ways = clock, ways
        self._running: dict[Way, Process] = {}
        self.best: dict[str, Way] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.close()

    def choose(self, phases: Sequence[str], ways: Sequence[Way] = ()) -> None:
        """Finds the best way for each phase (of `ways`: all), and loads it; the only one is taken
        as it is. Raises what `Process.run` does.
        """
        ways = ways or self._ways
        found: dict[str, list[tuple[float, Way]]] = {split(phase)[0]: [] for phase in phases}
        if len(ways) == 1:
            found = {kind: [(0.0, ways[0])] for kind in found}
        for way in ways if len(ways) > 1 else ():
            process = self._process(way)
            try:
                for kind, times in found.items():
                    process.run(kind, _FIRST)
                    took = [process.run(kind, _PROBE[kind]).by(self._clock) for _ in range(2)]
                    times.append((min(took), way))
            finally:
                process.close()
        self.best |= {phase: min(found[split(phase)[0]])[1] for phase in phases}
        for phase, way in self.best.items():
            if way not in self._running:
                self._running[way] = self._process(way)
            self._warm(phase)

    def run(self, phase: str) -> Took:
        """One run of a phase that was chosen for."""
        return self._running[self.best[phase]].run(*split(phase))

    def _warm(self, phase: str) -> None:
        """What a process that was just loaded does before it counts."""
        self._running[self.best[phase]].run(split(phase)[0], _FIRST)

    @abstractmethod
    def _process(self, way: Way) -> Process:
        """Starts the program in a way, its model loaded."""


def split(phase: str) -> tuple[str, int]:
    """Kind and count of a phase."""
    kind = phase.rstrip("0123456789")
    return kind, int(phase.removeprefix(kind))
