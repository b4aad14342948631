# SPDX-License-Identifier: Apache-2.0
"""How benchmarks/qos_gpu keeps to a time (`--seconds`): frames are as many as fit beside what cases
take besides, and a case that hangs ends while those after it still have theirs.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import common

ORDER = ("alone", "pvrd", "blind", "wallpaper", "llama")
SHORTER = 3  # times, are the frames of `blind` and `wallpaper`
# Of the compositor's frames each case has so many times those that were asked for, and takes so
# many seconds besides on an H200: the compositor's start, its settling, a model's file (alone) and
# its first token (pvrd: kernels are tried and timed), pvrd's start, llama-bench's.
FRAMES = {"alone": 1.0, "pvrd": 1.0, "blind": 1 / SHORTER, "wallpaper": 2 / SHORTER, "llama": 1.0}
BESIDE_S = {"alone": 30.0, "pvrd": 130.0, "blind": 10.0, "wallpaper": 50.0, "llama": 60.0}
END_S = 10.0  # of that what comes when the frames have begun
LEAST_FRAMES = 60


class Time:
    """What is left of `seconds` (0: any time will do) for the cases that are asked for."""

    def __init__(
        self,
        seconds: float,
        cases: Sequence[str],
        wanted: int,
        hz: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cases = [case for case in ORDER if case == "alone" or case in cases]
        self._wanted, self._hz, self._clock = wanted, hz, clock
        self._end = clock() + seconds if seconds else None

    def _from(self, case: str) -> list[str]:
        """The case and those after it."""
        return [c for c in self._cases if ORDER.index(c) >= ORDER.index(case)]

    def frames(self, case: str, begun: bool = False) -> int:
        """How many this case should count in a run; those after it will have as large a part of
        what was wanted. begun: what it takes besides lies behind it.

        Raises:
            SystemExit: there is no time for it.
        """
        part = 1.0
        if self._end is not None:
            rest = self._from(case)
            besides = sum(BESIDE_S[c] for c in rest)
            besides += END_S - BESIDE_S[case] if begun else 0.0
            whole = sum(FRAMES[c] for c in rest) * self._wanted / self._hz
            part = min(1.0, (self._end - self._clock() - besides) / whole)
        runs = SHORTER if case in ("blind", "wallpaper") else 1
        count = int(self._wanted * part / runs)
        if part < 1.0 and count < LEAST_FRAMES:
            raise SystemExit("no time is left for it")
        return max(LEAST_FRAMES, count)

    @contextlib.contextmanager
    def bounded(self, case: str) -> Iterator[None]:
        """Ends what takes the time of the cases after it.

        Raises:
            SystemExit: it took that long.
        """
        if self._end is None:
            yield
            return
        after = self._from(case)[1:]
        least = sum(BESIDE_S[c] + FRAMES[c] * LEAST_FRAMES / self._hz for c in after)
        left = self._end - self._clock() - least

        def late(*_: Any) -> None:
            raise SystemExit("it took too long")

        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, left))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def rows(
        self, case: str, rows: Callable[[], Iterator[common.Row]]
    ) -> Callable[[], Iterator[common.Row]]:
        """The same rows within the case's time."""

        def bounded() -> Iterator[common.Row]:
            with self.bounded(case):
                yield from rows()

        return bounded
