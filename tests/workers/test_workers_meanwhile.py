# SPDX-License-Identifier: Apache-2.0
"""What a worker leaves for later, while its device works on the next slice: nothing is lost, and
nobody waits for it longer than for a slice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.backends.base import NOTHING, NOWHERE, Into, Lent, RunStats
from engine.backends.crosscheck import CheckedBackend
from engine.backends.null import NullBackend, NullExecutable
from engine.backends.vulkan import VulkanBackend
from engine.errors import DeviceLost
from engine.meanwhile import MEANWHILE, Meanwhile
from engine.pace import LIMIT
from engine.video import plain
from pvrd.workers import loop, protocol
from pvrd.workers.devices import Opened
from pvrd.workers.loop import Worker
from pvrd.workers.timings import Meter
from pvrd.workers.video_jobs import VideoTask
from tests.workers.conftest import WAIT_S, Peer
from tests.workers.rings import MODEL, SLOTS, Ring, ring

__all__ = ["ring"]  # a fixture

FAR = 10**11  # ns
TOKENS, FRAMES = 60, 4


class Device(NullBackend):
    """Computes with numpy, and does what is left to do once it has begun, as Vulkan's does."""

    meanwhile = True

    def __init__(self) -> None:
        super().__init__(reference=True)
        self.info = replace(self.info, kind="gpu", software=False)
        self.beside = 0  # times that something was left to do
        self.works = False  # meanwhile
        self.fetched = 0  # times that outputs were brought by themselves
        self.loses = False  # at a submission beside which something is left to do

    def executable(self, program: Any, weights: Any, lent: Lent = NOTHING) -> NullExecutable:
        made: Any = super().executable(program, weights, lent)
        run, fetch = made.run, made.fetch

        def running(*sequences: str, into: Into = NOWHERE) -> RunStats:
            if self.meanwhile and MEANWHILE:
                if self.loses:
                    raise DeviceLost("of the test")
                self.beside, self.works = self.beside + 1, True
                MEANWHILE.run()
                self.works = False
            stats: RunStats = run(*sequences)
            fetch(into)
            return stats

        def fetching(into: Into) -> None:
            self.fetched += bool(into)
            fetch(into)

        made.run, made.fetch = running, fetching
        return made  # type: ignore[no-any-return]

    def adopt(self, memory: Any, fd: int = -1) -> Any:
        return SimpleNamespace(close=lambda: None)


class Inside(Peer):
    """A worker in a thread of the test."""

    def __init__(self, device: Any) -> None:
        self.sock, theirs = protocol.pair()
        self.sock.settimeout(WAIT_S)
        self.canary = []
        self.ended_with: list[int] = []
        worker = Worker(theirs, "gpu", 1, {}, lambda kind, config: Opened(device))

        self.theirs = theirs  # stays open: what was said is read to its end
        self.thread = threading.Thread(target=lambda: self.ended_with.append(worker.run()))
        self.send("hello", protocol=1, kind="gpu", generation=1, config={})
        self.thread.start()
        self.expect("hello")

    def close(self) -> Any:
        self.sock.close()
        self.thread.join(WAIT_S)
        self.theirs.close()


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def inside(device: Device, tiny: Path) -> Iterator[Inside]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(LIMIT, "streams", 0)  # a process has one worker, which ends with it
        made = Inside(device)
        stack.callback(made.close)
        made.load(tiny, key="t")
        made.load(MODEL, kind="video")
        yield made


def near(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.abs(x.astype(int) - y).max() <= 1 for x, y in zip(a, b, strict=True))


def text_and_frames(worker: Inside, ring: Ring, job: str, lease: int) -> list[int]:
    """A text beside some frames, each given when the last one is there; the text's ids."""
    worker.text(job, "Hello", model="t", max_tokens=TOKENS)
    tokens: list[dict[str, Any]] = []
    seq, done, ended = 0, 0, False
    while not ended or done < FRAMES:
        message = worker.recv()
        assert message["t"] not in ("error", "dying"), message
        if message["t"] == "text.token":
            tokens.append(message)
            worker.send("ack", job=job, n=message["n"] + 1)
        ended |= message["t"] == "text.end"
        if message["t"] == "frame.done":
            assert (message["seq"], message["status"], message["tiles_fallback"]) == (seq - 1, 0, 0)
            assert message["tiles"] >= 1
            assert near(ring.get(message["slot"]), ring.expected(message["slot"]))
            done += 1
        if len(tokens) > 2 and done == seq < FRAMES:
            ring.put(seq % SLOTS, seq)
            worker.send("frame", session="v", seq=seq, slot=seq % SLOTS, deadline_ns=lease,
                        lease_ns=lease)  # fmt: skip
            seq += 1
    assert done == FRAMES
    assert [token["n"] for token in tokens] == list(range(TOKENS))
    return [token["id"] for token in tokens]


@pytest.mark.parametrize("lent", [False, True])
def test_tokens_and_frames_are_told_while_the_device_works_on(
    inside: Inside, device: Device, ring: Ring, lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, settled = VideoTask._settle, []
    monkeypatch.setattr(
        VideoTask, "_settle", lambda *given: (settled.append(device.works), settle(*given))[1]
    )
    lease = time.monotonic_ns() + FAR if lent else 0
    inside.send("video.open", [ring.fd], **ring.message(unchanged="off"))
    inside.expect("video.ready")
    told = text_and_frames(inside, ring, "1", lease)
    assert any(settled)
    assert device.beside > sum(settled)  # tokens, too
    # A frame that is lent comes with the work once that is known, and alone before.
    assert device.fetched == (1 if lent else 0)
    inside.send("close", session="v")
    inside.text("2", "Hello", session="other", model="t", max_tokens=TOKENS)
    assert [token["id"] for token in inside.answer("2")[:-1]] == told


@pytest.mark.gpu
@pytest.mark.parametrize("lent", [False, True])
def test_on_a_gpu_text_and_frames_are_the_same(
    tiny: Path, ring: Ring, lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, settled = VideoTask._settle, []
    monkeypatch.setattr(
        VideoTask, "_settle", lambda *given: (settled.append(bool(works)), settle(*given))[1]
    )
    monkeypatch.setattr(LIMIT, "streams", 0)
    works: list[bool] = []
    with closing(VulkanBackend(True, force_staging=True, profile="")) as gpu, ExitStack() as stack:
        checked = CheckedBackend(gpu, 0.0)
        checked.info = replace(checked.info, software=False)  # the test's own threads stay
        submit: Any = gpu._device.submit

        def both(submission: Any) -> None:
            submit(submission)
            works.append(True)
            MEANWHILE.run()
            works.clear()

        monkeypatch.setattr(gpu._device, "submit", both)
        monkeypatch.setattr(gpu, "meanwhile", True, raising=False)
        worker = Inside(checked)
        stack.callback(worker.close)
        worker.load(tiny, key="t")
        worker.load(MODEL, kind="video")
        worker.send("govern", slice_ms=2.0, group_scale=1.0, share=1.0, refresh_hz=60.0)
        worker.send("video.open", [ring.fd], **ring.message(unchanged="off"))
        worker.expect("video.ready")
        told = text_and_frames(worker, ring, "1", time.monotonic_ns() + FAR if lent else 0)
        assert len(settled) == FRAMES
        worker.send("close", session="v")
        worker.text("2", "Hello", session="other", model="t", max_tokens=TOKENS)
        assert [token["id"] for token in worker.answer("2")[:-1]] == told


def test_without_other_work_a_frame_is_told_at_once(inside: Inside, ring: Ring) -> None:
    inside.send("video.open", [ring.fd], **ring.message())
    inside.expect("video.ready")
    for seq in range(2 * SLOTS):
        ring.put(seq % SLOTS, seq)
        inside.send("frame", session="v", seq=seq, slot=seq % SLOTS, deadline_ns=0)
        assert inside.expect("frame.done")["seq"] == seq
    inside.send("ping", n=7)
    assert inside.expect("pong")["n"] == 7


def test_what_was_done_before_a_device_is_lost_stays_done(
    inside: Inside, device: Device, ring: Ring
) -> None:
    inside.send("video.open", [ring.fd], **ring.message())
    inside.expect("video.ready")
    inside.text("1", "Hello", model="t", max_tokens=200)
    tokens, frames = 0, 0
    last: dict[str, Any] = {"t": ""}
    while last["t"] != "dying":
        last = inside.recv()
        tokens += last["t"] == "text.token"
        frames += last["t"] == "frame.done"
        if last["t"] == "text.token":
            inside.send("ack", job="1", n=last["n"] + 1)
        if tokens == 3 and last["t"] == "text.token":
            ring.put(0, 1)
            inside.send("frame", session="v", seq=1, slot=0, deadline_ns=0)
        device.loses = frames > 0
    assert frames == 1
    inside.thread.join(WAIT_S)
    assert inside.ended_with == [loop.EXIT_LOST]
    assert not MEANWHILE


def test_a_frame_that_fails_later_fails_alone(
    inside: Inside, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> list[int]:
        raise RuntimeError("of the test")

    inside.send("video.open", [ring.fd], **ring.message())
    inside.expect("video.ready")
    inside.text("1", "Hello", model="t", max_tokens=24)
    inside.expect("text.token")
    inside.send("ack", job="1", n=24)
    monkeypatch.setattr(plain, "implausible", broken)
    inside.send("frame", session="v", seq=1, slot=0, deadline_ns=0)
    error = ended = False
    while not (error and ended):
        message = inside.recv()
        if message["t"] == "error":
            assert message["session"] == "v"
            error = True
        ended |= message["t"] == "text.end"
    monkeypatch.undo()
    inside.send("video.open", [ring.fd], **ring.message())  # its name is free again
    inside.expect("video.ready")


def test_what_is_left_is_done_before_a_wait_for_the_compositor() -> None:
    gate, done = Meter().gate, []
    gate.rhythm.pace(60.0)
    waits = iter([1e-3, 0.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate.rhythm, "wait", lambda now, need: next(waits))
        MEANWHILE.add(lambda: done.append(1))
        gate.run("part", lambda: done.append(2))
    assert done == [1, 2]
    assert gate.waited >= 1e-3


@pytest.mark.parametrize("host_s", [0.0, 1.0])
def test_where_the_host_worked_longer_a_submission_tells_nothing(host_s: float) -> None:
    gate, now = Meter().gate, [0.0]
    clock: Any = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])

    def submit() -> None:
        now[0] += 1.0 + host_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pvrd.workers.paced.time", clock)
        patch.setattr(MEANWHILE, "seconds", 0.0)
        gate.run("part", submit)
        assert gate.rhythm.alone("part") == pytest.approx(1.0 + host_s)

        def busy() -> None:
            MEANWHILE.seconds += 1.0
            submit()

        gate.run("other", busy)
    assert bool(gate.rhythm.alone("other")) == (host_s > 0)


def test_work_is_done_in_order_and_once() -> None:
    left, done = Meanwhile(), []
    for i in range(3):
        left.add(lambda i=i: done.append(i))  # type: ignore[misc]
    left.add(lambda: left.run())
    assert len(left) == 4
    left.run()
    left.run()
    assert (done, len(left), left.ran) == ([0, 1, 2], 0, 4)
    left.add(lambda: 1 / 0)
    left.add(lambda: done.append(3))
    with pytest.raises(ZeroDivisionError):
        left.run()
    assert len(left) == 1
    left.clear()
    assert not left
