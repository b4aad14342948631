# SPDX-License-Identifier: Apache-2.0
"""Live frames without a daemon, or with one that is older."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from pvrd.errors import InvalidArgument
from pvrd.hooks import frames
from pvrd.hooks.frames import Closed, Frames, Shape
from pvrd.options import VIDEO_SESSION, parse
from tests.buses import WAIT_S, until

NOBODY = "unix:path=/nonesuch/bus"


@pytest.mark.parametrize("pixel", ["i420", "nv12", "i444", "gray"])
def test_frames_without_a_daemon_are_scaled_plainly(pixel: str) -> None:
    shape = Shape(6, 4, pixel)
    planes = [np.zeros(size, np.uint8) for size in shape.planes()]
    planes[0][:] = np.arange(6) * 40
    for n, plane in enumerate(planes[1:]):
        plane[:] = 50 + n
    if pixel == "nv12":
        planes[1][:, 1::2] = 90
    with Frames(shape, (12, 8), bus=NOBODY, start=0.0) as live:
        for n in range(3):
            live.feed(planes, n)
            result = live.take()
            assert (result.ticket, result.device, result.degraded) == (n, "", True)
            large = result.planes
            assert [plane.shape for plane in large] == shape.planes(12, 8)
            assert (large[0] == [0, 10, 30, 50, 70, 90, 110, 130, 150, 170, 190, 200]).all()
            if pixel == "nv12":
                assert (large[1] == [50, 90] * 6).all()
            else:
                assert [set(plane.flat) for plane in large[1:]] == [{50}, {51}][: len(large) - 1]
        assert (live.done, live.plain, live.late) == (3, 3, 0)


def test_who_drains_hears_that_a_frame_scaled_here_was_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of a stream waits for that, and nothing else wakes it."""
    monkeypatch.setattr(frames, "RETRY_S", 3600.0)

    def take(live: Frames) -> None:
        with contextlib.suppress(Closed):
            live.take()

    with Frames(Shape(2, 2, "gray"), (4, 4), bus=NOBODY) as live:
        live.feed([np.zeros((2, 2), np.uint8)], 0)
        live.take()
        drains = threading.Thread(target=live.drain, daemon=True)
        drains.start()
        # With the one that looks for a daemon again.
        until(lambda: len(live._state._waiters) == 2, "a thread that drains")  # type: ignore[attr-defined]
        threading.Thread(target=take, args=(live,), daemon=True).start()
        drains.join(WAIT_S)
        assert not drains.is_alive()


def test_who_scales_plainly_may_be_chosen() -> None:
    def plain(planes: Any) -> Any:
        return "large", int(planes[0][0, 0])

    with Frames(Shape(2, 2, "gray"), (4, 4), bus=NOBODY, start=0.0, plain=plain) as live:
        live.feed([np.full((2, 2), 7, np.uint8)], "a")
        assert live.take().planes == ("large", 7)


def test_an_older_daemon_interpolates_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know the wish to leave that to the client: it is asked again without."""
    older = {key: value for key, value in VIDEO_SESSION.items() if key != "interpolate"}
    asked: list[Mapping[str, Any]] = []

    class Older:
        def __init__(self, bus: str | None) -> None:
            pass

        def __enter__(self) -> Older:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def open_video(self, settings: Mapping[str, Any]) -> Any:
            asked.append(dict(settings))
            parse({key: value for key, value in settings.items() if key == "interpolate"}, older)
            raise InvalidArgument("the size is 1 to 16384, not 0")  # it ends here

    monkeypatch.setattr(frames, "Client", Older)
    asks = Frames(Shape(2, 2, "gray"), (4, 4), {"interpolate": False})
    with asks as live, pytest.raises(InvalidArgument, match="the size"):
        live.feed([np.zeros((2, 2), np.uint8)], 0)
    assert ["interpolate" in settings for settings in asked] == [True, False]


def test_a_session_that_never_says_what_became_of_frames_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []
    ours, theirs = socket.socketpair()

    class Silent:
        slots = credits = 2
        submitted = 0

        def __init__(self, bus: str | None = None) -> None:
            self.planes = [[np.zeros((2, 2), np.uint8)] for _ in range(self.slots)]

        def __enter__(self) -> Silent:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def open_video(self, settings: Mapping[str, Any]) -> Silent:
            opened.append(1)
            return Silent()

        def fileno(self) -> int:
            return ours.fileno()

        def arrays(self, slot: int) -> list[Any]:
            return self.planes[slot]

        def submit(self, *_: int) -> None:
            Silent.submitted += 1

        def shut(self) -> None:
            pass

    monkeypatch.setattr(frames, "Client", Silent)
    monkeypatch.setattr(frames, "RETRY_S", 0.0)
    with ours, theirs, Frames(Shape(2, 2, "gray"), (4, 4)) as live:
        until(lambda: opened, "a session")
        for silent_s, sessions in ((3600.0, 1), (0.0, 2)):
            monkeypatch.setattr(frames, "SILENT_S", silent_s)
            for n in range(4):
                due = time.monotonic_ns() + 40_000_000
                live.feed([np.full((2, 2), n, np.uint8)], n, due)
                assert live.take().device == ""
            until(lambda sessions=sessions: len(opened) >= sessions, "sessions")  # type: ignore[misc]
            assert silent_s == 0.0 or (len(opened), Silent.submitted) == (1, 2)
