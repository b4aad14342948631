# SPDX-License-Identifier: Apache-2.0
"""Video with deadlines beside devices that are slow, stuck, killed or held: no frame is lost, all
come in order, and what no network makes in time is interpolated.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from pvrd.client import Client
from pvrd.client_video import Done, VideoSession
from pvrd.errors import Busy
from tests.buses import until
from tests.daemons import Daemon
from tests.e2e.test_e2e_video import HEIGHT, WIDTH, write

pytestmark = pytest.mark.bus
Start = Callable[..., Daemon]
# Wide enough for a machine that does other things: what counts is that frames fall, not how fast.
INTERVAL, AHEAD = 0.15, 3
CALM = {"governor.enabled": False}
SIZE = {"width": WIDTH, "height": HEIGHT, "unchanged": "off"}


class Player:
    """Submits frames at a steady pace, whatever comes back; a frame without a slot is left out."""

    def __init__(self, video: VideoSession, ahead: int = AHEAD) -> None:
        """ahead: intervals from a frame to its deadline."""
        self.video = video
        self.ahead = ahead
        self.free = list(range(video.slots))
        self.seq = self.skipped = 0
        self.done: list[Done] = []
        self.late = 0
        self._next = time.monotonic()
        self._deadlines: dict[int, float] = {}

    def play(self, count: int) -> list[Done]:
        """So many frames more; what came back of them."""
        before = len(self.done)
        for _ in range(count):
            self._read(self._next)
            now = time.monotonic()
            self._next = max(self._next + INTERVAL, now)
            if not self.free:
                self.skipped += 1
                continue
            slot = self.free.pop(0)
            write(self.video, slot, self.seq % 5)
            deadline = now + self.ahead * INTERVAL
            self._deadlines[self.seq] = deadline
            self.video.submit(self.seq, slot, pts=self.seq, deadline=int(1e9 * deadline))
            self.seq += 1
        while self._deadlines:
            self._read(time.monotonic() + 30, once=True)
        assert [d.seq for d in self.done] == list(range(self.seq))
        return self.done[before:]

    def _read(self, end: float, once: bool = False) -> None:
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.video], [], [], left)[0]:
                return
            if (done := self.video.receive()) is not None:
                self.late += time.monotonic() > self._deadlines.pop(done.seq)
                self.done.append(done)
                self.free.append(done.slot)
                if once:
                    return


def opened(client: Client, **settings: Any) -> VideoSession:
    video = client.open_video({"model": "quality", **SIZE, **settings})
    for _ in range(2):
        video.receive()
        if video.credits:
            return video
    raise AssertionError("no credits")


def ready(video: VideoSession) -> None:
    def look() -> bool:
        state = video.session.properties()
        assert not state["Error"], state["Error"]
        return bool(state["Ready"])

    until(look, "the session")


def names(video: VideoSession, done: list[Done]) -> list[str]:
    levels = video.session.properties()["Levels"]
    return [levels[d.level] for d in done]


@pytest.mark.gpu
def test_a_slow_gpu_costs_quality_not_frames(daemon: Start) -> None:
    # A submission of it takes longer than frames may.
    faults = ["gpu:slow:600"]
    made = daemon({**CALM, "gpu.allow_software": True, "debug.faults": faults})
    with made.client() as client, opened(client, slots=6) as video:
        made.ready(client, "gpu")
        ready(video)
        player = Player(video)
        player.play(6)
        done = player.play(8)
        assert not any(d.dropped for d in done)
        state = video.session.properties()
        assert state["Levels"] == [
            "gpu nsr-quality", "gpu nsr-balanced", "gpu nsr-fast", "cpu nsr-quality",
            "cpu nsr-balanced", "cpu nsr-fast", "plain",
        ]  # fmt: skip
        assert names(video, done).count("cpu nsr-fast") >= 6
        assert state["Level"] == 5
        assert "ms of" in state["LevelReason"]


def test_a_sound_device_stays_at_its_network(daemon: Start) -> None:
    made = daemon({**CALM, "gpu.enabled": False})
    with made.client() as client, opened(client, device="cpu") as video:
        ready(video)
        done = Player(video).play(10)
        assert not any(d.dropped for d in done)
        assert names(video, done).count("cpu nsr-quality") >= 8
        levels = video.session.properties()["Levels"]
        assert levels == ["cpu nsr-quality", "cpu nsr-balanced", "cpu nsr-fast", "plain"]
    with made.client() as client, opened(client, adapt=False, device="cpu") as video:
        ready(video)
        assert video.session.properties()["Levels"] == ["cpu nsr-quality"]
        assert {d.level for d in Player(video).play(3)} == {0}


@pytest.mark.gpu
def test_a_stuck_gpu_freezes_nothing(daemon: Start) -> None:
    made = daemon({**CALM, "gpu.allow_software": True})
    with made.client() as client, opened(client, slots=6) as video:
        gpu = int(made.ready(client, "gpu")["pid"])
        ready(video)
        player = Player(video)
        player.play(3)  # now it is known that there are deadlines
        until(lambda: "gpu" in names(video, player.play(2))[-1], "frames of the GPU")
        os.kill(gpu, signal.SIGSTOP)
        try:
            done = player.play(12)
            assert not any(d.dropped for d in done)
            # The first ones were the GPU's and were interpolated; then the CPU has networks.
            assert any(d.degraded for d in done[:3])
            assert {d.device for d in done[3:]} == {"cpu"}
            assert names(video, done)[-1].startswith("cpu nsr-")
        finally:
            os.kill(gpu, signal.SIGCONT)
        until(lambda: "gpu" in names(video, player.play(4))[-1], "frames of the GPU again")
        assert video.session.properties()["Restarts"] == 0


@pytest.mark.gpu
def test_killed_workers_lose_no_frame(daemon: Start) -> None:
    made = daemon({**CALM, "gpu.allow_software": True})
    with made.client() as client, opened(client, slots=6) as video:
        made.ready(client, "gpu")
        ready(video)
        # Time enough for a control process that starts a worker on a machine without a free CPU:
        # a frame that nobody looked at until after its deadline may be dropped.
        player = Player(video, ahead=20)
        player.play(4)
        os.kill(int(made.device(client, "gpu")["pid"]), signal.SIGKILL)
        done = player.play(6)
        assert not any(d.dropped for d in done)
        os.kill(int(made.device(client, "cpu")["pid"]), signal.SIGKILL)
        # Nobody can make the next ones for a moment: each has an answer all the same.
        until(lambda: not player.play(4)[-1].dropped, "frames again")
        assert video.session.properties()["Restarts"] == 2


def test_a_paused_session_lets_go(daemon: Start) -> None:
    made = daemon({**CALM, "gpu.enabled": False})
    with made.client() as client, opened(client, device="cpu", slots=6, share=60) as video:
        ready(video)
        player = Player(video)
        player.play(2)
        video.pause()
        assert video.session.properties()["Paused"]
        assert all(d.dropped for d in player.play(3))  # nobody would see them
        with pytest.raises(Busy):
            client.open_text({"model": "tiny", "share": 60})

        def free() -> bool:
            try:
                client.open_text({"model": "tiny", "share": 60}).close()
            except Busy:
                return False
            return True

        until(free, "its share")
        video.resume()
        until(lambda: not player.play(2)[-1].dropped, "frames again")
        with pytest.raises(Busy):
            client.open_text({"model": "tiny", "share": 60})
        write(video, player.free[0], 0)
        video.pause()
        video.submit(1000, player.free[0])  # no deadline: it waits
        assert not select.select([video], [], [], 0.3)[0]
        video.resume()
        done = None
        while done is None:
            done = video.receive()
        assert not done.dropped
