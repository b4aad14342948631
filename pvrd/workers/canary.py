# SPDX-License-Identifier: Apache-2.0
"""The canary: how much longer slices take than the same slices take alone, on any driver.

For each kind of slice what it takes alone is a low quantile of what it took lately; it falls at
once and rises slowly, so that a neighbour who stays for minutes does not become the measure, while
a device that was clocked down for good does, in the end.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any

KINDS = 1024  # that are remembered
WINDOW = 64  # slices of a kind that the quantile is of
KNOWN = 8  # slices after which a kind is known
QUANTILE = 0.1
RISE_S = 1800.0  # of slices, in which the measure of a kind may double
EVERY_S = 0.25  # between two words to pvrd


class _Kind:
    def __init__(self) -> None:
        self.lately: deque[float] = deque(maxlen=WINDOW)
        self.alone = math.inf
        self.count = 0
        self.seconds = 0.0  # since the measure was made

    def took(self, seconds: float) -> float | None:
        """What it takes alone, when that is known."""
        self.lately.append(seconds)
        self.count += 1
        self.seconds += seconds
        if self.count == KNOWN or not self.count % (WINDOW // 4):
            low = sorted(self.lately)[int(QUANTILE * len(self.lately))]
            most = self.alone * 2 ** (self.seconds / RISE_S)
            self.alone, self.seconds = min(low, most), 0.0
        return self.alone if self.count >= KNOWN else None


class Canary:
    """Counts slices; `tell` makes the message of them."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._took = self._alone = self._busy = 0.0
        self._slices = 0
        self._since: float | None = None

    def slice(self, kind: Hashable, seconds: float) -> None:
        """A slice of this kind took so long."""
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = _Kind()
            if len(self._kinds) > KINDS:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(kind)
        self._busy += seconds
        self._slices += 1
        if (alone := found.took(seconds)) is not None:
            self._took += seconds
            self._alone += alone

    def rest(self) -> None:
        """There is nothing to do for now: the time until the next slice is not counted."""
        self._since = None

    def tell(self, now: float) -> dict[str, Any] | None:
        """After a slice: what pvrd is told, at most once in EVERY_S; None when it is not time.
        ratio: time of slices by what the same take alone, None while no kind is known.
        """
        if self._since is None:
            self._since = now - self._busy
        past = now - self._since
        if past < EVERY_S or not self._slices:
            return None
        ratio = round(self._took / self._alone, 3) if self._alone else None
        busy = round(min(1.0, self._busy / past), 3)
        told = {"t": "canary", "ratio": ratio, "busy": busy, "slices": self._slices}
        self._took = self._alone = self._busy = 0.0
        self._slices, self._since = 0, now
        return told
