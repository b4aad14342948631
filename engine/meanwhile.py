# SPDX-License-Identifier: Apache-2.0
"""What the host has still to do for work that is done on a device, while the device does the next.

A process works on one device in one thread, which waits for each submission. Whatever need not be
done before the next one is kept here; the backend does it (`run`) between a submission and the wait
for its end. Whoever is about to wait for anything else, or to begin something long, does it first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Meanwhile:
    """Work in the order in which it came. It submits nothing to a device."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self.seconds = 0.0  # that all of it took
        self.ran = 0  # how much of it was done

    def __len__(self) -> int:
        return len(self._work)

    def add(self, work: Callable[[], object]) -> None:
        """Something to do soon."""
        self._work.append(work)

    def run(self) -> None:
        """Does all that is there.

        Raises:
            As the work: what comes after it stays.
        """
        while self._work:
            began = time.perf_counter()
            work = self._work.popleft()
            try:
                work()
            finally:
                self.ran += 1
                self.seconds += time.perf_counter() - began

    def clear(self) -> None:
        """Forgets what is there."""
        self._work.clear()


MEANWHILE = Meanwhile()
