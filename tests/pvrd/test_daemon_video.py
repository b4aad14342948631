# SPDX-License-Identifier: Apache-2.0
"""Video over the bus, with fake workers: each frame once and in order."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import time
from typing import Any

import pytest

from pvrd.bus_values import plain
from pvrd.slot_socket import SlotMessage

pytestmark = pytest.mark.bus
SUBMIT, DONE, CREDIT, DROP, ERROR = 1, 2, 3, 4, 5
VIDEO = "org.pvrd.Pvrd1.VideoSession"


class Video:
    """A video session as a client sees it."""

    def __init__(self, caller: Any, **options: Any) -> None:
        self.caller = caller
        given = {"width": 16, "height": 8, **options}
        reply = caller.call("OpenVideo", "a{sv}", [caller.options(**given)])
        self.path, ring, sock, layout = reply.body
        self.layout = plain(layout)
        fd = reply.fds.take(ring)
        self.ring = mmap.mmap(fd, self.layout["ring_bytes"])
        self.size = os.fstat(fd).st_size
        self.seals = fcntl.fcntl(fd, 1034)
        os.close(fd)
        self.sock = socket.socket(fileno=reply.fds.take(sock))
        self.sock.settimeout(30)
        credit = self.read()
        assert (credit.type, credit.credits) == (CREDIT, self.layout["slots"])

    def read(self) -> SlotMessage:
        return SlotMessage.unpack(self.sock.recv(128))

    def submit(self, seq: int, value: int = 1, deadline: int = 0, slot: int | None = None) -> None:
        slot = seq % self.layout["slots"] if slot is None else slot
        if slot < self.layout["slots"]:
            self.ring[slot * self.layout["slot_bytes"]] = value
        self.sock.send(SlotMessage(SUBMIT, seq, slot, pts=1000 + seq, deadline=deadline).pack())

    def output(self, slot: int) -> int:
        offset: int = slot * self.layout["slot_bytes"] + self.layout["out_planes"][0][0]
        return self.ring[offset]

    def close(self) -> None:
        self.sock.close()
        self.ring.close()


def stream_frames(video: Video, count: int, special: dict[int, int]) -> list[SlotMessage]:
    """Sends frames as credits allow; what came back."""
    got: list[SlotMessage] = []
    sent, credits = 0, video.layout["slots"]
    while len(got) < count:
        while credits and sent < count:
            video.submit(sent, special.get(sent, 1 + sent % 60))
            sent, credits = sent + 1, credits - 1
        message = video.read()
        assert message.type == DONE, message
        value = special.get(message.seq, 1 + message.seq % 60)
        assert video.output(message.slot) == value ^ 0xFF
        got.append(message)
        credits += 1
    return got


@pytest.fixture(scope="module")
def daemon(start: Any) -> Any:
    return start()


def test_frames(daemon: Any, caller: Any) -> None:
    caller.state("gpu")
    video = Video(caller)
    assert video.layout["in_planes"] == [[0, 64, 16, 8], [512, 64, 8, 4], [768, 64, 8, 4]]
    assert video.layout["out_planes"][0] == [4096, 64, 32, 16]
    assert (video.layout["model"], video.layout["out_width"]) == ("fake-x2", 32)
    assert video.size == video.layout["ring_bytes"] == 4 * video.layout["slot_bytes"]
    assert video.seals == 1 | 2 | 4
    got = stream_frames(video, 50, {30: 68})
    assert [m.seq for m in got] == list(range(50))
    assert [m.pts for m in got] == [1000 + n for n in range(50)]
    assert {(m.tiles, m.work_ns, m.device) for m in got} == {(4, 1500000, 1)}
    assert [m.seq for m in got if m.status == 1 and m.tiles_fallback == 1] == [30]
    assert caller.get("Frames", video.path, VIDEO) == 50
    assert caller.get("Degraded", video.path, VIDEO) == 1
    times = caller.get("Times", video.path, VIDEO)
    assert (times["compute"], times["queue"], times["download"]) == (62.5, 25.0, 0.0)
    assert (times["upload_wait"], "queue_wait" in times) == (6.0, False)
    (listed,) = plain(caller.call("ListJobs", "a{sv}", [{}]).body[0])
    assert (listed["kind"], listed["frames"], listed["state"]) == ("video", 50, "idle")
    video.close()


@pytest.mark.parametrize(
    ("hostile", "status"),
    [
        (lambda v: v.sock.send(b"garbage"), 1),
        (lambda v: v.sock.send(bytes(64)), 1),
        (lambda v: v.sock.send(bytes(5000)), 1),
        (lambda v: v.sock.send(SlotMessage(DONE).pack()), 1),
        (lambda v: socket.send_fds(v.sock, [SlotMessage(SUBMIT).pack()], [0, 1, 2]), 1),
        (lambda v: [v.submit(5, slot=0), v.submit(5, slot=1)], 3),
        (lambda v: [v.submit(5, slot=0), v.submit(4, slot=1)], 3),
        (lambda v: v.submit(0, slot=99), 4),
    ],
)
def test_garbage_closes_the_session(
    daemon: Any, caller: Any, until: Any, hostile: Any, status: int
) -> None:
    caller.state("gpu")
    video = Video(caller)
    hostile(video)
    while (message := video.read()).type != ERROR:
        assert message.type == DONE
    assert message.status == status
    assert video.sock.recv(1) == b""
    until(lambda: caller.fails("Close", path=video.path, interface=VIDEO)[0] == "NoSuchSession")
    video.close()


def test_frames_that_the_gpu_cannot_make_go_to_the_cpu(daemon: Any, caller: Any) -> None:
    caller.state("gpu")
    video = Video(caller)
    got = stream_frames(video, 20, {10: 69})
    assert [m.seq for m in got] == list(range(20))
    assert (got[9].device, got[10].device, got[19].device) == (1, 2, 2)
    assert caller.get("Restarts", video.path, VIDEO) == 0
    assert caller.get("Precision", video.path, VIDEO) == "f32"  # as on the GPU
    video.close()


def test_a_session_on_the_cpu_has_its_models_precision(daemon: Any, caller: Any) -> None:
    for options, precision in (({}, "f32"), ({"precision": "model"}, "int8")):
        video = Video(caller, device="cpu", **options)
        stream_frames(video, 2, {})
        assert caller.get("Precision", video.path, VIDEO) == precision
        video.close()


@pytest.mark.parametrize("how", [65, 66])
def test_worker_stops_or_dies_and_the_session_returns(start: Any, callers: Any, how: int) -> None:
    # 65 stops the worker. No shorter: one that a busy machine lets wait would be taken for it.
    start({"deadlines.slice_s": 2.0, "deadlines.ping_s": 0.1} if how == 65 else {})
    caller = callers()
    caller.state("gpu")
    video = Video(caller)
    got = stream_frames(video, 40, {10: how})
    assert [m.seq for m in got] == list(range(40))
    assert got[9].device == 1
    assert got[10].device == 2
    assert caller.get("Restarts", video.path, VIDEO) == 1
    caller.state("gpu")
    device = 2
    seq = 40
    while device == 2:  # until a frame comes from the GPU again
        video.submit(seq)
        message = video.read()
        assert (message.type, message.seq) == (DONE, seq)
        device, seq = message.device, seq + 1
    video.close()


def test_frame_that_kills_three_workers(start: Any, callers: Any, until: Any) -> None:
    start()
    caller = callers()
    caller.state("gpu")
    video = Video(caller)
    video.submit(0, 1)
    assert video.read().type == DONE
    video.submit(1, 67)
    message = video.read()
    assert (message.type, message.status) == (ERROR, 5)
    assert video.sock.recv(1) == b""
    assert caller.get("Error", video.path, VIDEO).startswith("DeviceLost")
    caller.call("Close", path=video.path, interface=VIDEO)
    video.close()
    caller.state("gpu")
    again = Video(caller)
    stream_frames(again, 5, {})
    again.close()


def test_late_frame_is_dropped(start: Any, callers: Any) -> None:
    start()
    caller = callers()
    caller.state("gpu")
    video = Video(caller)
    video.submit(0)
    video.submit(1, deadline=1)
    video.submit(2, deadline=time.monotonic_ns() + 10**12)
    got = [video.read() for _ in range(3)]
    assert [(m.type, m.seq, m.slot) for m in got] == [(DONE, 0, 0), (DROP, 1, 1), (DONE, 2, 2)]
    video.submit(3, slot=1)
    assert video.read().type == DONE
    video.close()


A_WHILE_S = 1.0  # a worker that is not stopped has answered then, on a busy machine too


def soon(seconds: float = A_WHILE_S) -> int:
    return time.monotonic_ns() + int(1e9 * seconds)


def one(video: Video, seq: int, seconds: float = A_WHILE_S) -> SlotMessage:
    """The answer to a frame with a deadline."""
    video.submit(seq, deadline=soon(seconds))
    message = video.read()
    assert message.seq == seq
    return message


def pids(caller: Any) -> list[int]:
    return [device["pid"] for device in caller.get("Devices")]


def test_nobody_answers_and_no_frame_is_lost(start: Any, callers: Any) -> None:
    start({"sensors.system": False, "deadlines.slice_s": 60.0})
    caller = callers()
    caller.state("gpu")
    video = Video(caller, slots=8)
    seq = 0
    while one(video, seq).device != 1:
        seq += 1
    gpu, cpu = stopped = pids(caller)
    try:
        os.kill(gpu, signal.SIGSTOP)
        got = [one(video, seq + n + 1) for n in range(8)]
        assert {m.type for m in got} == {DONE}
        # The GPU's frame was interpolated; it is not asked again before it answers.
        assert {m.device for m in got} == {2}
        assert got[0].deadline == len(caller.get("Levels", video.path, VIDEO)) - 1
        assert caller.get("LevelReason", video.path, VIDEO)
        os.kill(cpu, signal.SIGSTOP)
        assert one(video, seq + 9).type == DROP
        assert one(video, seq + 10).type == DROP
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    seq += 11
    # It climbs, level by level, to the first one.
    while (message := one(video, seq)).device != 1 or message.deadline:
        seq += 1
    assert caller.get("Restarts", video.path, VIDEO) == 0
    assert caller.get("Dropped", video.path, VIDEO) >= 2
    assert (caller.get("Level", video.path, VIDEO), caller.get("Device", video.path, VIDEO)) == (
        0, "gpu",
    )  # fmt: skip
    video.close()


def test_what_no_network_makes_is_left_to_the_client(start: Any, callers: Any) -> None:
    start({"sensors.system": False, "deadlines.slice_s": 60.0})
    caller = callers()
    caller.state("gpu")
    video = Video(caller, slots=8, interpolate=False)
    seq = 0
    while one(video, seq).type != DONE:
        seq += 1
    stopped = pids(caller)
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        assert {one(video, seq + n + 1).type for n in range(4)} == {DROP}
        last = len(caller.get("Levels", video.path, VIDEO)) - 1
        assert caller.get("Level", video.path, VIDEO) == last
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    seq += 5
    while (message := one(video, seq)).type != DONE or message.device != 1 or message.deadline:
        seq += 1
    assert caller.get("Degraded", video.path, VIDEO) == 0
    assert caller.get("Level", video.path, VIDEO) == 0
    video.close()


@pytest.mark.parametrize("timed", [True, False])
def test_a_hold_is_obeyed_and_its_end_too(start: Any, callers: Any, timed: bool) -> None:
    start({"sensors.system": False})
    caller = callers()
    caller.state("gpu")
    video = Video(caller, slots=8)

    def play(device: int, seq: int) -> int:
        """Frames until one comes from a device; each is done."""
        while True:
            video.submit(seq, deadline=soon(5.0) if timed else 0)
            message = video.read()
            assert (message.type, message.seq) == (DONE, seq)
            seq += 1
            if message.device == device and not (device == 1 and message.deadline):
                return seq

    seq = play(1, 0)
    reply = caller.call("Hold", "sa{sv}", ["a game", {}])
    hold = reply.fds.take(reply.body[0])
    seq = play(2, seq)
    assert "a game" in caller.get("LevelReason", video.path, VIDEO)
    assert caller.get("Device", video.path, VIDEO) == "cpu"
    os.close(hold)
    play(1, seq)
    assert caller.get("LevelReason", video.path, VIDEO) == ""
    assert caller.get("Restarts", video.path, VIDEO) == 0
    video.close()


def test_a_paused_session(start: Any, callers: Any) -> None:
    start({"sensors.system": False})
    caller = callers()
    caller.state("gpu")
    video = Video(caller)
    assert one(video, 0, 60.0).type == DONE
    caller.call("Pause", "b", [True], path=video.path, interface=VIDEO)
    assert caller.get("Paused", video.path, VIDEO)
    assert one(video, 1, 60.0).type == DROP
    video.submit(2)
    caller.call("Pause", "b", [False], path=video.path, interface=VIDEO)
    assert (video.read().type, caller.get("Paused", video.path, VIDEO)) == (DONE, False)
    video.close()


def test_beyond_credits(start: Any, callers: Any) -> None:
    start(arguments=["--slow-load", "5"])
    caller = callers()
    caller.state("gpu")
    video = Video(caller, slots=2)
    for seq in range(2):
        video.submit(seq)
    video.submit(2)
    message = video.read()
    assert (message.type, message.status) == (ERROR, 2)
    video.close()


def test_slots_follow_the_quota(start: Any, callers: Any) -> None:
    start({"limits.bytes": 300000, "limits.sessions": 2})
    caller = callers()
    caller.state("gpu")
    video = Video(caller, width=128, height=128)
    assert video.layout["slots"] < 4
    wanted = caller.options(width=128, height=128, slots=4)
    name, text = caller.fails("OpenVideo", "a{sv}", [wanted])
    assert name == "QuotaExceeded"
    assert "300000" in text
    caller.call("Close", path=video.path, interface=VIDEO)
    video.close()
    first = Video(caller, width=128, height=128)
    assert first.layout["slots"] == video.layout["slots"]
    caller.open_text()
    assert caller.fails("OpenText", "a{sv}", [{}])[0] == "QuotaExceeded"
    first.close()


def test_the_session_ends_with_its_socket(start: Any, callers: Any, until: Any) -> None:
    daemon = start()
    caller = callers()
    caller.state("gpu")
    before = daemon.fds()
    for _ in range(20):
        video = Video(caller)
        stream_frames(video, 3, {})
        video.close()
    until(lambda: daemon.fds() <= before)


def test_message_form() -> None:
    message = SlotMessage(SUBMIT, 2**63, 3, 0, -5, 7)
    data = message.pack()
    assert len(data) == 64
    assert struct.unpack_from("<IHHQI", data) == (0x53525650, 1, 1, 2**63, 3)
    assert struct.unpack_from("<qQ", data, 24) == (-5, 7)
    assert SlotMessage.unpack(data) == message
    assert select.PIPE_BUF == 4096
