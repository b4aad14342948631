# SPDX-License-Identifier: Apache-2.0
"""Live frames through pvrd: each comes back once, in order and enlarged, whatever happens to the
daemon. While there is none they are scaled plainly, and it is asked for again every second. Only
frames whose deadline is over are left out, as long as others come.

One thread feeds, another takes:

    with Frames(Shape(640, 360), (1280, 720), {"model": "fast"}) as frames:
        frames.feed(planes, ticket)             # waits while all slots are under way
        result = frames.take()                  # waits for the oldest
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pvrd.client import Client, NoDaemon
from pvrd.errors import (
    BadModel,
    InvalidArgument,
    NotAuthorized,
    PvrdError,
    UnknownModel,
    UnsupportedModel,
)
from pvrd.hooks.plain import scalers

if TYPE_CHECKING:
    from pvrd.client_video import Planes, VideoSession

RETRY_S = 1.0
START_S = 10.0
TIDY_S = 30.0  # signals that nobody reads are taken off the bus so often
PLAIN_AT_ONCE = 4
FREEZE_S = 0.25  # after so long without a frame even a late one is shown
# What another try would not mend.
_FINAL = (InvalidArgument, UnknownModel, BadModel, UnsupportedModel, NotAuthorized)


@dataclass(frozen=True)
class Shape:
    """The frames that come: sizes in pixels; pixel i420, nv12, i444 or gray, 8 bits."""

    width: int
    height: int
    pixel: str = "i420"
    siting: str = "left"
    full_range: bool = False

    def planes(self, width: int = 0, height: int = 0) -> list[tuple[int, int]]:
        """(rows, samples) of each plane, of this size or another."""
        w, h = width or self.width, height or self.height
        half = ((h + 1) // 2, (w + 1) // 2)
        return [(h, w)] + {
            "gray": [],
            "i420": [half, half],
            "nv12": [(half[0], 2 * half[1])],
            "i444": [(h, w)] * 2,
        }[self.pixel]


@dataclass(frozen=True)
class Result:
    """An enlarged frame; the planes are its own until the next take(). `device` is empty where it
    was scaled plainly here, `degraded` says that pvrd made it by less than its network."""

    ticket: Any
    planes: Planes
    device: str
    degraded: bool


@dataclass
class _Entry:
    ticket: Any
    seq: int = 0
    video: VideoSession | None = None  # where it is under way, in `slot`
    slot: int = 0
    planes: Planes | None = None  # its own copy where there was no session
    flushed: bool = False


class Closed(Exception):
    """close() was called."""


class Frames:
    """See above.

    Args:
        shape: of what is fed.
        out: width and height of what comes back, 1 to 8 times those of the shape.
        settings: further options of OpenVideo (model, device, priority, share, adapt).
        bus: as Client's.
        depth: at most so many frames under way.
        start: seconds that the first frame waits for a session that is being opened.
    """

    def __init__(
        self,
        shape: Shape,
        out: tuple[int, int],
        settings: Mapping[str, Any] | None = None,
        bus: str | None = None,
        depth: int = 4,
        start: float = START_S,
    ) -> None:
        self.shape = shape
        self.done = self.plain = 0  # frames that came back, and those of them scaled here
        self.late = 0  # frames that were left out
        self._last = 0.0
        self.reason = ""  # why there is no session now
        self._settings = {
            **(settings or {}),
            "width": shape.width, "height": shape.height, "pixel": shape.pixel,
            "siting": shape.siting, "full_range": shape.full_range,
            "out_width": out[0], "out_height": out[1], "slots": depth,
        }  # fmt: skip
        self._bus, self._start = bus, start
        self._scalers = scalers(shape.planes(), shape.planes(*out), shape.pixel)
        self._state = threading.Condition()
        self._order: deque[_Entry] = deque()
        self._video: VideoSession | None = None
        self._free: list[int] = []
        self._room = 0  # frames that the session takes at once
        self._held: _Entry | None = None  # whose planes the last Result shows
        self._seq = 0
        self._tried = self._closed = False
        self._refused: PvrdError | None = None
        self._thread = threading.Thread(target=self._keep, name="pvrd-frames", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session; whoever waits in feed() or take() gets Closed."""
        with self._state:
            self._closed = True
            if self._video is not None:
                self._video.shut()
            self._state.notify_all()
        self._thread.join()

    # -- the session, kept by a thread of its own: a Client belongs to one

    def _keep(self) -> None:
        while not self._closed:
            try:
                with Client(self._bus) as client, client.open_video(self._settings) as video:
                    while video.credits < 1:
                        video.receive()
                    self._serve(video)
            except _FINAL as error:
                self._end(error)
                return
            except (PvrdError, OSError) as error:
                self._fail(str(error))
            except Exception as error:  # a fault here must not stop the camera
                self._fail(f"{type(error).__name__}: {error}")
            with self._state:
                self._state.wait_for(lambda: self._closed, RETRY_S)

    def _serve(self, video: VideoSession) -> None:
        with self._state:
            self._video, self._free = video, list(range(video.slots))
            self._room = min(video.credits, video.slots)
            self._tried, self.reason = True, ""
            self._state.notify_all()
            while not self._closed and self._video is video:
                if not self._state.wait_for(
                    lambda: self._closed or self._video is not video, TIDY_S
                ):
                    with contextlib.suppress(NoDaemon):
                        video.session.properties()
            video.shut()
            self._lose(video)

    def _fail(self, reason: str) -> None:
        with self._state:
            self._tried, self.reason = True, reason
            self._state.notify_all()

    def _end(self, error: PvrdError) -> None:
        with self._state:
            self._tried, self._refused, self.reason = True, error, str(error)
            self._state.notify_all()

    def _lose(self, video: VideoSession) -> None:
        """The session is gone: what was under way is scaled here, from the ring, which stays."""
        for entry in self._order:
            if entry.video is video:
                entry.planes, entry.video = video.arrays(entry.slot), None
        if self._video is video:
            self._video = None
        self._state.notify_all()

    # -- frames

    def feed(self, planes: Sequence[Any], ticket: Any, deadline: int = 0) -> None:
        """Hands a frame over, (rows, samples) arrays of uint8 that are copied; `deadline` is
        CLOCK_MONOTONIC in ns, 0 for none.

        Raises:
            Closed: close() was called.
            PvrdError: pvrd will never take these frames or settings.
        """
        with self._state:
            self._state.wait_for(lambda: self._tried or self._closed, self._start)
            self._state.wait_for(lambda: self._closed or self._refused or self._has_room())
            if self._closed:
                raise Closed
            if self._refused:
                raise self._refused
            video, entry = self._video, _Entry(ticket)
            if video is None:
                entry.planes = [plane.copy() for plane in planes]
                self._order.append(entry)
                self._state.notify_all()
                return
            entry.video, entry.slot = video, self._free.pop(0)
            self._seq += 1
            entry.seq = self._seq
            for target, plane in zip(video.arrays(entry.slot), planes, strict=True):
                target[:] = plane
            self._order.append(entry)
            try:
                video.submit(entry.seq, entry.slot, entry.seq, deadline)
            except (PvrdError, OSError) as error:
                self.reason = str(error)
                self._lose(video)
            self._state.notify_all()

    def _has_room(self) -> bool:
        if self._video is None:
            return len(self._order) < PLAIN_AT_ONCE
        mine = sum(entry.video is self._video for entry in self._order)
        return bool(self._free) and mine < self._room

    def take(self) -> Result:
        """The oldest frame, enlarged; waits for one.

        Raises:
            Closed: close() was called.
        """
        with self._state:
            self._give_back()
        while True:
            with self._state:
                self._state.wait_for(lambda: self._order or self._closed)
                if self._closed:
                    raise Closed
                entry = self._order[0]
                video = entry.video
            done = None
            if video is not None:
                try:
                    done = video.receive()
                except (PvrdError, OSError, RuntimeError) as error:
                    with self._state:
                        self.reason = str(error)
                        self._lose(video)
                    continue
                if done is None:
                    continue
            with self._state:
                self._order.popleft()
                self._held = entry
                self._state.notify_all()
                now = time.monotonic()
                late = done is not None and done.dropped and now < self._last + FREEZE_S
                self.late += late
                if entry.flushed or late:
                    self._give_back()
                    continue
                self.done += 1
                self._last = now
            if done is not None and video is not None and not done.dropped:
                return Result(entry.ticket, video.results(entry.slot), done.device, done.degraded)
            source = entry.planes if video is None else video.arrays(entry.slot)
            assert source is not None
            made = [scale(plane) for scale, plane in zip(self._scalers, source, strict=True)]
            self.plain += 1
            return Result(entry.ticket, list(made), "", True)

    def _give_back(self) -> None:
        held, self._held = self._held, None
        if held is not None and held.video is not None and held.video is self._video:
            self._free.append(held.slot)
            self._state.notify_all()

    def drain(self) -> None:
        """Waits until all that was fed has been taken, and the taker is back in take().

        Raises:
            Closed: close() was called.
        """
        with self._state:
            self._state.wait_for(lambda: self._closed or not (self._order or self._held))
            if self._closed:
                raise Closed

    def flush(self) -> None:
        """What is under way is not taken any more."""
        with self._state:
            for entry in self._order:
                entry.flushed = True
