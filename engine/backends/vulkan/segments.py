# SPDX-License-Identifier: Apache-2.0
"""A slice in several submissions, for a device that has to be let go in between.

A sequence that takes long (a token of a large model) is recorded anew as parts with about equal
numbers of calls; what follows it in the slice goes with its last part. All parts are submitted and
waited for one by one, in order, so what they compute is what the whole slice does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine.backends.vulkan import api

Paced = Callable[[tuple[str, int, int], Callable[[], None]], None]


def never() -> bool:
    """Nothing is waiting."""
    return False


class Segments:
    """Of one VulkanExecutable; made when they are first wanted, they end with it."""

    def __init__(self, executable: Any) -> None:
        self._exe = executable
        self._parts: dict[tuple[str, int], list[Any]] = {}
        self._ready: dict[tuple[int, tuple[str, ...], int], Any] = {}

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

        `paced(kind, submit)` is called for each submission, in order, and has to call `submit`;
        kind is (cut, count, number of the part), which tells those apart that take different times.

        Raises:
            DeviceLost
        """
        exe = self._exe
        exe._send()
        spent, at, done, runs = 0.0, 0, 0, 0

        def submit(submission: Any, count: bool) -> None:
            nonlocal spent
            began = time.perf_counter()
            exe._backend._submit(submission, count)
            spent += time.perf_counter() - began

        while at < len(sequences) and not (done and stop()):
            after = at + 1
            while after < len(sequences) and sequences[after] != cut:
                after += 1
            own = tuple(sequences[at:after])
            at = after
            done += own[0] == cut
            runs += sum(len(exe.program.sequences[name]) for name in own)
            many = len(self.parts(cut, count)) if own[0] == cut else 1
            for number in range(many):
                key = count, own, number
                if key not in self._ready:
                    self._ready[key] = exe._backend._device.submission(
                        self._commands(own, cut, count, number, many)
                    )
                paced((own[0], count, number), partial(submit, self._ready[key], number == 0))
        exe._backend._counters["dispatches"] += runs
        return spent, done

    def _commands(
        self, own: tuple[str, ...], cut: str, count: int, number: int, many: int
    ) -> list[Any]:
        recorded = self._exe._recorded
        if own[0] != cut:
            return [recorded[name] for name in own]
        rest = [recorded[name] for name in own[1:]] if number == many - 1 else []
        return [self.parts(cut, count)[number], *rest]
