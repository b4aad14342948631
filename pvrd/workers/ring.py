# SPDX-License-Identifier: Apache-2.0
"""The frame ring as a worker has it: mapped, and its slots written to only while they are lent."""

from __future__ import annotations

import fcntl
import mmap
import os
import time

from engine.errors import InvalidArgument
from engine.video.frames import Bytes
from engine.video.upscale import Planes

AMPLE, SPARE_S = 3.0, 3e-3  # times what work takes, and seconds, that have to be left for it


def map_ring(fd: int, nbytes: int) -> mmap.mmap:
    """The frame ring; `fd` stays the caller's.

    Raises:
        InvalidArgument: it could shrink under the mapping, or has another size.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise InvalidArgument("The frame ring is no memfd.") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidArgument("The frame ring is not sealed against shrinking.")
    size = os.fstat(fd).st_size
    if size != nbytes or nbytes <= 0:
        raise InvalidArgument(f"The frame ring has {size} bytes, not {nbytes}.")
    return mmap.mmap(fd, nbytes)


class Expired(Exception):
    """A frame's lease is over."""


class Leased(Planes):
    """Planes of a slot that may be written to until a time (CLOCK_MONOTONIC ns).

    pvrd gives the frame to another worker then. One that was stuck meanwhile should not write when
    it wakes up: the slot may hold the next frame. So a device that knows the ring (`direct`) brings
    results there after a look at the clock: in a submission that does nothing else, or in that of
    the work where there is far more time than it takes (`lend`); and pvrd lets a slot's next frame
    wait for the word about its last one while there is time.
    """

    def __init__(self, planes: Planes, until: int, direct: bool = False) -> None:
        self.__dict__.update(planes.__dict__)
        self._until, self.claims = until, direct
        self._work_s = 0.0

    def lend(self, wait_s: float, work_s: float) -> None:
        """The next slice waits for its turn and then works for about so long, 0 where nobody knows:
        may results come with it?
        """
        left_s = (self._until - time.monotonic_ns()) / 1e9
        self.lasts = work_s > 0 and left_s > wait_s + AMPLE * work_s + SPARE_S
        self._work_s = work_s

    def still(self) -> None:
        """Raises Expired: the work would not be done before the lease is over."""
        if time.monotonic_ns() + 1e9 * self._work_s >= self._until:
            raise Expired

    def place(self, plane: int, begin: int, end: int) -> Bytes | None:
        """Rows for a moment, where the device brings results. Raises Expired."""
        if not self.claims:
            return None
        if time.monotonic_ns() >= self._until:
            raise Expired
        return super().place(plane, begin, end)

    def put(self, plane: int, begin: int, rows: Bytes) -> None:
        """Raises Expired."""
        if time.monotonic_ns() >= self._until:
            raise Expired
        super().put(plane, begin, rows)
