# SPDX-License-Identifier: Apache-2.0
"""Video sessions: frames lie in a ring that pvrd made; each is enlarged in place, some tiles a slice."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import InvalidArgument
from pvrd.workers.models import Models

DEFAULT_PRIORITY = 5
OK, DEGRADED, DROPPED = 0, 1, 2

Send = Callable[[Mapping[str, Any]], None]


def map_ring(fd: int, nbytes: int) -> mmap.mmap:
    """The frame ring; `fd` stays the caller's.

    Raises:
        InvalidArgument: it could shrink under the mapping, or has another size.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise InvalidArgument("The frame ring is no memfd.") from None
    if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != nbytes or nbytes <= 0:
        raise InvalidArgument("The frame ring is not sealed or has a wrong size.")
    return mmap.mmap(fd, nbytes)


class VideoTask:
    """One video session and the frames that wait in it, done in the order of arrival."""

    def __init__(self, models: Models, message: Mapping[str, Any], fd: int, send: Send) -> None:
        self.session = str(message["session"])
        self.priority = int(message.get("priority", DEFAULT_PRIORITY))
        self._frames: deque[Mapping[str, Any]] = deque()

    def subject(self) -> Mapping[str, str]:
        return {"session": self.session}

    def deadline(self) -> int | None:
        return None

    def ready(self) -> bool:
        return bool(self._frames)

    def submit(self, frame: Mapping[str, Any]) -> None:
        self._frames.append(frame)

    def step(self) -> bool:
        return True

    def close(self) -> None:
        return
