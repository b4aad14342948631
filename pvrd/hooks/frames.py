# SPDX-License-Identifier: Apache-2.0
"""Live frames through pvrd: each comes back once, in order and enlarged, whatever happens to the
daemon. While there is none they are scaled plainly, and it is asked for again every second. So are
frames with a deadline that pvrd makes by no network in time: pvrd says so as soon as it knows, and
when it says nothing the frame is not waited for. Only frames whose deadline is over when their turn
comes are left out, as long as others come.

One thread feeds, another takes:

    with Frames(Shape(640, 360), (1280, 720), {"model": "fast"}) as frames:
        frames.feed(planes, ticket)             # waits while all slots are under way
        result = frames.take()                  # waits for the oldest
"""

from __future__ import annotations

import contextlib
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from pvrd.hooks.frame import Entry, Result, Shape
from pvrd.hooks.plain import scalers

if TYPE_CHECKING:
    from pvrd.client_video import Done, Planes, VideoSession

RETRY_S = 1.0
START_S = 10.0
TIDY_S = 30.0  # signals that nobody reads are taken off the bus so often
PLAIN_AT_ONCE = 4
FREEZE_S = 0.25  # after so long without a frame even a late one is shown
PLAIN_S, PLAIN_MOST_S = 0.004, 0.02  # that a frame takes here, until it was measured; reckoned with
SPARE_S = 0.003  # for turns of threads, and the way on
SILENT_S = 5.0  # that pvrd may owe the word about a frame; then the session is given up
__all__ = ["Closed", "Frames", "Result", "Shape"]

# What another try would not mend.
_FINAL = (InvalidArgument, UnknownModel, BadModel, UnsupportedModel, NotAuthorized)


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
        plain: scales the planes of a frame here; else numpy does.
    """

    def __init__(
        self,
        shape: Shape,
        out: tuple[int, int],
        settings: Mapping[str, Any] | None = None,
        bus: str | None = None,
        depth: int = 4,
        start: float = START_S,
        plain: Callable[[Planes], Any] | None = None,
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
        made = [] if plain else scalers(shape.planes(), shape.planes(*out), shape.pixel)
        self._plain = plain or (
            lambda planes: [scale(plane) for scale, plane in zip(made, planes, strict=True)]
        )
        self._plain_s = PLAIN_S
        self._state = threading.Condition()
        self._order: deque[Entry] = deque()
        self._video: VideoSession | None = None
        self._free: list[int] = []
        # Frames that are waited for no more: seq -> slot, and since when.
        self._over: dict[int, tuple[int, float]] = {}
        self._room = 0  # frames that the session takes at once
        self._held: Entry | None = None  # whose planes the last Result shows
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
                if not self._knows(error):
                    self._end(error)
                    return
                continue
            except (PvrdError, OSError) as error:
                self._fail(str(error))
            except Exception as error:  # a fault here must not stop the camera
                self._fail(f"{type(error).__name__}: {error}")
            with self._state:
                self._state.wait_for(lambda: self._closed, RETRY_S)

    def _knows(self, error: PvrdError) -> bool:
        """Is it that an older daemon interpolates always? It is asked without that wish then."""
        if "interpolate" not in str(error):
            return False
        return self._settings.pop("interpolate", None) is not None

    def _serve(self, video: VideoSession) -> None:
        with self._state:
            self._video, self._free = video, list(range(video.slots))
            self._over.clear()
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
            self._over.clear()
        self._state.notify_all()

    # -- frames

    def feed(self, planes: Sequence[Any], ticket: Any, deadline: int = 0) -> None:
        """Hands a frame over, (rows, samples) arrays of uint8 that are copied; `deadline` is
        CLOCK_MONOTONIC in ns, 0 for none: take() returns the frame before that.

        Raises:
            Closed: close() was called.
            PvrdError: pvrd will never take these frames or settings.
        """
        with self._state:
            self._state.wait_for(lambda: self._tried or self._closed, self._start)
            due = deadline / 1e9
            self._state.wait_for(
                lambda: self._closed or self._refused or self._has_room(), self._left(due)
            )
            if self._closed:
                raise Closed
            if self._refused:
                raise self._refused
            self._look()
            video, entry = self._video, Entry(ticket, due=due)
            if video is None or not self._has_room():
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
                told = max(1, int(1e9 * self._limit(due))) if due else 0
                video.submit(entry.seq, entry.slot, entry.seq, told)
            except (PvrdError, OSError) as error:
                self.reason = str(error)
                self._lose(video)
            self._state.notify_all()

    def _look(self) -> None:
        """A session that owes the word about a frame for long is given up: another is opened."""
        since = min((since for _, since in self._over.values()), default=math.inf)
        if self._video is not None and time.monotonic() > since + SILENT_S:
            self.reason = "pvrd does not answer"
            self._lose(self._video)

    def _has_room(self) -> bool:
        if self._video is None:
            return len(self._order) < PLAIN_AT_ONCE
        mine = sum(entry.video is self._video for entry in self._order) + len(self._over)
        return bool(self._free) and mine < self._room

    def _limit(self, due: float) -> float:
        """The last moment at which a frame can be scaled here."""
        return due - 1.5 * self._plain_s - SPARE_S

    def _left(self, due: float) -> float | None:
        """Seconds that a frame may still wait; None without a limit."""
        return max(0.0, self._limit(due) - time.monotonic()) if due else None

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
                asked = video or (self._video if self._over else None)
            done = None
            if asked is not None:
                try:
                    done = self._answer(asked, entry)
                except (PvrdError, OSError, RuntimeError) as error:
                    with self._state:
                        self.reason = str(error)
                        self._lose(asked)
                    continue
            with self._state:
                if self._closed:
                    raise Closed
                self._order.popleft()
                self._held = entry
                if done is None and video is not None and entry.video is video:
                    self._over[entry.seq] = entry.slot, time.monotonic()
                    entry.planes, entry.video = video.arrays(entry.slot), None
                made = done is not None and not done.dropped
                now = time.monotonic()
                late = bool(entry.due) and not made and entry.due < now < self._last + FREEZE_S
                self.late += late
                self._state.notify_all()
                if entry.flushed or late:
                    self._give_back()
                    continue
                self.done += 1
                self._last = now
            if made and done is not None and video is not None:
                return Result(entry.ticket, video.results(entry.slot), done.device, done.degraded)
            source = entry.planes if entry.video is None else entry.video.arrays(entry.slot)
            assert source is not None
            planes = self._plain(source)
            took = time.monotonic() - now
            self._plain_s = min(PLAIN_MOST_S, max(took, 0.9 * self._plain_s + 0.1 * took))
            self.plain += 1
            return Result(entry.ticket, planes, "", True)

    def _answer(self, video: VideoSession, entry: Entry) -> Done | None:
        """What pvrd says of a frame; None when the time that it has is over. One that is not with
        pvrd is not waited for, but what lies there is heard.

        Raises:
            PvrdError, OSError, RuntimeError: the session is over.
        """
        ready = select.poll()
        ready.register(video, select.POLLIN)
        while True:
            left = self._left(entry.due) if entry.video is video else 0.0
            if not ready.poll(None if left is None else math.ceil(1000 * left)):
                return None
            done = video.receive()
            if done is None:
                continue
            if entry.video is video and done.seq == entry.seq:
                return done
            with self._state:
                slot, _ = self._over.pop(done.seq, (None, 0.0))
                if slot is not None and video is self._video:
                    self._free.append(slot)
                self._state.notify_all()

    def _give_back(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        if held.video is not None and held.video is self._video:
            self._free.append(held.slot)
        self._state.notify_all()  # drain() waits for frames that were scaled here, too

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
