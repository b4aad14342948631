# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the CPU beside us: a process for each of its ways that keeps the model loaded, so
that runs can be interleaved without a load between them, and that tells its own CPU time.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks import peers

CLOCKS = ("wall", "cpu")


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


@dataclass(frozen=True, order=True)
class Way:
    """How llama.cpp runs: weights laid out anew for its kernels or not, flash attention or not."""

    repack: bool
    attention: bool

    def __str__(self) -> str:
        return f"{'re' if self.repack else 'not re'}packed, fa {'on' if self.attention else 'off'}"


# The first is how it runs by itself.
WAYS = tuple(Way(repack, attention) for repack in (True, False) for attention in (True, False))

_PROBE = {"decode": 8, "prefill": 64}  # tokens by which ways are compared


def environment(clock: str) -> dict[str, str]:
    """What llama.cpp is run with."""
    env = dict(os.environ)
    env.pop("GOMP_SPINCOUNT", None)  # our kernels' library sets it, for itself
    if clock == "cpu":  # where others have the CPU that a thread waits for, it would spin
        env["OMP_WAIT_POLICY"] = "passive"
    return env


class _Process:
    def __init__(self, program: Path, file: Path, threads: int, way: Way, clock: str) -> None:
        command = [str(program), str(file), str(threads)]
        command += [str(int(way.repack)), str(int(way.attention))]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(clock),
        )

    def run(self, line: str) -> Took:
        """One run. Raises SystemExit where the program ended."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(f"{line}\n")
            self._child.stdin.flush()
            return Took(*map(float, self._child.stdout.readline().split()))
        except (OSError, TypeError, ValueError):
            self.close()
            raise SystemExit(f"llama_rate ended at {line!r}.") from None

    def close(self) -> None:
        self._child.communicate()


class LlamaPeer:
    """llama.cpp with one file. Each phase (`decode32`, `prefill128`, …) is run in the way that was
    the fastest at a short one of its kind, the model loaded once for a way that is in use. By the
    clock `cpu` its threads sleep where they wait for each other.
    """

    def __init__(self, file: Path, threads: int, clock: str, program: Path | None = None) -> None:
        source = Path(__file__).with_name("llama_rate.cpp")
        self._program = program or peers.llama_program(source)
        self._file, self._threads, self._clock = file, threads, clock
        self._running: dict[Way, _Process] = {}
        self.best: dict[str, Way] = {}

    def __enter__(self) -> LlamaPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.close()

    def choose(self, phases: Sequence[str], ways: Sequence[Way] = WAYS) -> None:
        """Finds the best way for each phase; the only one is taken as it is."""
        probes = {_kind(phase): f"{_kind(phase)} {_PROBE[_kind(phase)]}" for phase in phases}
        found: dict[str, list[tuple[float, Way]]] = {kind: [] for kind in probes}
        if len(ways) == 1:
            found = {kind: [(0.0, ways[0])] for kind in probes}
        for way in ways if len(ways) > 1 else ():
            process = self._process(way)
            for kind, line in probes.items():
                process.run(f"{kind} 4")  # pages, threads, caches
                least = min(process.run(line).by(self._clock) for _ in range(2))
                found[kind].append((least, way))
            process.close()
        self.best |= {phase: min(found[_kind(phase)])[1] for phase in phases}
        for phase, way in self.best.items():
            if way not in self._running:
                self._running[way] = self._process(way)
            self._running[way].run(f"{_kind(phase)} 4")

    def run(self, phase: str) -> Took:
        """One run of a phase that was chosen for."""
        kind = _kind(phase)
        return self._running[self.best[phase]].run(f"{kind} {phase.removeprefix(kind)}")

    def _process(self, way: Way) -> _Process:
        return _Process(self._program, self._file, self._threads, way, self._clock)


def _kind(phase: str) -> str:
    return phase.rstrip("0123456789")
