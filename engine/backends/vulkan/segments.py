# SPDX-License-Identifier: Apache-2.0
"""A slice in several submissions, for a device that has to be let go in between.

A sequence that takes long (a token of a large model) is recorded anew as parts with about equal
numbers of calls; what follows it in the slice goes with its last part. All parts are submitted and
waited for in order, one by one or some together where there is time for them, so what they compute
is what the whole slice does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from engine.backends.vulkan import api

LONGEST = 20  # parts that are offered to go together


class Part(NamedTuple):
    """The `number`th of `of` parts of a sequence: of own[0], which the others follow."""

    own: tuple[str, ...]
    wanted: int  # parts that were asked for
    number: int
    of: int

    @property
    def last(self) -> bool:
        """Is it the sequence's last part?"""
        return self.number == self.of - 1


Run = tuple[Part, ...]  # parts that follow one another
Paced = Callable[[Sequence[Run], Callable[[Run], None]], int]


def never() -> bool:
    """Nothing is waiting."""
    return False


class Segments:
    """Of one VulkanExecutable; made when they are first wanted, they end with it."""

    def __init__(self, executable: Any) -> None:
        self._exe = executable
        self._parts: dict[tuple[str, int], list[Any]] = {}
        self._ready: dict[Run, Any] = {}

    def parts(self, name: str, count: int) -> list[Any]:
        """Command buffers for a sequence in at most `count` parts."""
        key = name, count
        if key not in self._parts:
            exe = self._exe
            calls = exe._dispatches[name]
            count = max(1, min(count, len(calls)))
            ends = [len(calls) * i // count for i in range(count + 1)]
            commands = exe._backend._device.commands(exe._stack, count)
            for cmd, begin, end in zip(commands, ends[:-1], ends[1:], strict=True):
                api.record(cmd, calls[begin:end])
            self._parts[key] = commands
        return self._parts[key]

    def run(
        self,
        sequences: Sequence[str],
        cut: str,
        count: int,
        paced: Paced,
        stop: Callable[[], bool] = never,
    ) -> tuple[float, int]:
        """Runs a slice whose sequences `cut` are in `count` parts; seconds of all submissions, and
        how many of those sequences were run: all, unless `stop()` said after one, with what
        belongs to it, that the slice is to end.

        `paced(runs, submit)` is called until all is done. `runs` are what could be submitted next:
        the next part, more of them up to the sequence's end, and up to the ends of those that
        follow. It has to call `submit` with one of them, and gives its length.

        Raises:
            DeviceLost
        """
        exe = self._exe
        exe._send()
        parts = self._cut(sequences, cut, count)
        spent, at, done, calls = 0.0, 0, 0, 0

        def submit(run: Run) -> None:
            nonlocal spent
            if run not in self._ready:
                commands = [command for part in run for command in self._commands(part, cut)]
                self._ready[run] = exe._backend._device.submission(commands)
            began = time.perf_counter()
            exe._backend._submit(self._ready[run])
            spent += time.perf_counter() - began

        while at < len(parts) and not (parts[at].number == 0 and done and stop()):
            length = paced(_runs(parts, at), submit)
            for part in parts[at : at + length]:
                if part.last:
                    done += part.own[0] == cut
                    calls += sum(len(exe.program.sequences[name]) for name in part.own)
            at += length
        exe._backend._counters["dispatches"] += calls
        return spent, done

    def _cut(self, sequences: Sequence[str], cut: str, count: int) -> list[Part]:
        """The parts of a slice."""
        found: list[Part] = []
        begins = [i for i, name in enumerate(sequences) if not i or name == cut]
        for begin, end in zip(begins, [*begins[1:], len(sequences)], strict=True):
            own = tuple(sequences[begin:end])
            of = len(self.parts(cut, count)) if own[0] == cut else 1
            found += [Part(own, count, number, of) for number in range(of)]
        return found

    def _commands(self, part: Part, cut: str) -> list[Any]:
        recorded = self._exe._recorded
        if part.own[0] != cut:
            return [recorded[name] for name in part.own]
        rest = [recorded[name] for name in part.own[1:]] if part.last else []
        return [self.parts(cut, part.wanted)[part.number], *rest]


def _runs(parts: Sequence[Part], at: int) -> list[Run]:
    """What could be next, the shortest first."""
    rest = at + parts[at].of - parts[at].number
    ends = [*range(at + 1, rest + 1)]
    ends += [i + 1 for i in range(rest, min(len(parts), at + LONGEST)) if parts[i].last]
    return [tuple(parts[at:end]) for end in ends]
