# SPDX-License-Identifier: Apache-2.0
"""Video sessions in the real worker program, on the CPU."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.video.upscale import Planes
from pvrd.workers.ring import Expired, Leased
from pvrd.workers.timings import PARTS
from tests.workers.conftest import ROOT, Peer
from tests.workers.rings import MODEL, SLOTS, Ring, Start, ring, same, worker

__all__ = ["ring", "worker"]  # fixtures


def test_frames_come_back_in_order_and_enlarged(worker: Peer, ring: Ring) -> None:
    worker.send("video.open", [ring.fd], **ring.message())
    assert worker.expect("video.ready")["tiles"] >= 1
    for slot in range(SLOTS):
        ring.put(slot, slot)
        worker.send("frame", session="v", seq=10 + slot, slot=slot, deadline_ns=0)
    for slot in range(SLOTS):
        done = worker.expect("frame.done")
        assert (done["session"], done["seq"], done["slot"]) == ("v", 10 + slot, slot)
        assert (done["status"], done["tiles_fallback"]) == (0, 0)
        assert done["tiles"] >= 1
        assert done["ms"] > 0
        assert set(done["times"]) == set(PARTS)
        assert 0 < done["times"]["compute"] <= done["ms"]
        assert same(ring.get(slot), ring.expected(slot))


def test_short_slices_take_tile_by_tile_and_change_no_sample(worker: Peer, ring: Ring) -> None:
    worker.send("govern", slice_ms=0.001, group_scale=1.0, share=1.0, parked=False)
    worker.send("video.open", [ring.fd], **ring.message(tile=8))
    tiles = worker.expect("video.ready")["tiles"]
    assert tiles > 4
    worker.send("stats")
    before = worker.expect("stats")["counters"]["submissions"]
    ring.put(0, 1)
    worker.send("frame", session="v", seq=1, slot=0, deadline_ns=0)
    worker.expect("frame.done")
    assert same(ring.get(0), ring.expected(0))
    worker.send("stats")
    assert worker.expect("stats")["counters"]["submissions"] - before == tiles


def test_precision_is_the_sessions_own(worker: Peer, ring: Ring) -> None:
    for session, precision in (("v", ""), ("w", "int8"), ("x", "auto")):
        given = ring.message(precision=precision) | {"session": session}
        worker.send("video.open", [ring.fd], **given)
        told = worker.expect("video.ready")["precision"]
        assert told in {"": ("f32",), "int8": ("int8",), "auto": ("f32", "int8")}[precision]
    ring.put(0, 0)
    worker.send("frame", session="w", seq=0, slot=0, deadline_ns=0)
    worker.expect("frame.done")
    rough, exact = ring.get(0), ring.expected(0)
    assert not same(rough, exact)
    assert max(np.abs(a.astype(int) - b).max() for a, b in zip(rough, exact, strict=True)) < 16


BALANCED = ROOT / "engine/video/models/nsr-balanced.pvrm"


def test_a_session_has_levels(worker: Peer, ring: Ring) -> None:
    worker.load(BALANCED, key="b", kind="video")
    given = ring.message(models=["b"], levels=[["m"], ["nothing"], []], measure=True)
    worker.send("video.open", [ring.fd], **given)
    ready = worker.expect("video.ready")
    assert ready["left_out"] == {"2": "UnknownModel: The model is not loaded."}
    assert [took is None or took > 0 for took in ready["takes"]] == [True] * 4
    assert [took is None for took in ready["takes"]] == [False, False, True, False]
    found = []
    for seq, level in enumerate((0, 1, 3, 1, 1)):
        ring.put(seq % SLOTS, 7)
        worker.send("frame", session="v", seq=seq, slot=seq % SLOTS, level=level, deadline_ns=0)
        done = worker.expect("frame.done")
        assert done["level"] == level
        assert (done["status"], done["tiles_fallback"]) == ((1, 1) if level == 3 else (0, 0))
        # What another level wrote since is nobody's result to reuse.
        assert bool(done["tiles_reused"]) == (seq == 4)
        found.append(ring.get(seq % SLOTS))
    assert same(found[1], ring.expected(1))
    assert same(found[3], found[1])
    assert same(found[4], found[1])
    assert not same(found[0], found[1])
    assert not same(found[2], found[1])
    worker.send("frame", session="v", seq=9, slot=0, level=2, deadline_ns=0)
    assert "no level 2" in worker.error()["message"]


def test_what_others_wrote_is_not_reused(worker: Peer, ring: Ring) -> None:
    worker.send("video.open", [ring.fd], **ring.message())
    reused = []
    for seq, fresh in enumerate((False, False, True)):
        ring.put(0, 7)
        worker.send("frame", session="v", seq=seq, slot=0, deadline_ns=0, fresh=fresh)
        reused.append(worker.expect("frame.done")["tiles_reused"] > 0)
    assert reused == [False, True, False]


def test_a_lent_frame_is_given_up_at_its_deadline(worker: Peer, ring: Ring) -> None:
    worker.send("video.open", [ring.fd], **ring.message())
    worker.expect("video.ready")
    ring.put(0, 0)
    before = ring.get(0)
    worker.send("frame", session="v", seq=1, slot=0, deadline_ns=1, lease_ns=1)  # over already
    done = worker.expect("frame.done")
    assert done["given_up"]
    assert done["part"] == 0
    assert same(ring.get(0), before)
    far = time.monotonic_ns() + 10**11
    worker.send("frame", session="v", seq=2, slot=0, deadline_ns=far, lease_ns=far)
    assert "given_up" not in worker.expect("frame.done")
    assert same(ring.get(0), ring.expected(0))


def test_a_lease_that_ended_before_its_turn_is_told_at_once(worker: Peer, ring: Ring) -> None:
    worker.send("video.open", [ring.fd], **ring.message())
    worker.expect("video.ready")
    worker.send("govern", parked=True)
    for seq, lease in enumerate((0, 1)):
        ring.put(seq, seq)
        worker.send("frame", session="v", seq=seq, slot=seq, deadline_ns=0, lease_ns=lease)
    worker.send("govern", parked=False)
    told = [worker.expect("frame.done") for _ in range(2)]
    assert [(done["seq"], done.get("given_up", False)) for done in told] == [(1, True), (0, False)]
    assert same(ring.get(0), ring.expected(0))


def test_nothing_is_put_where_a_lease_is_over() -> None:
    plane = np.zeros((4, 64), np.uint8)
    rows = np.ones((2, 64), np.uint8)
    Leased(Planes([plane], [8]), time.monotonic_ns() + 10**12).put(0, 1, rows)
    assert plane.sum() == 16
    with pytest.raises(Expired):
        Leased(Planes([plane], [8]), time.monotonic_ns()).put(0, 3, rows)
    assert plane.sum() == 16


def test_results_come_with_the_work_where_there_is_far_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0]
    monkeypatch.setattr("pvrd.workers.ring.time.monotonic_ns", lambda: now[0])
    planes = Planes([np.zeros((4, 64), np.uint8)], [8])
    lent = Leased(planes, 20_000_000, direct=True)
    assert lent.claims
    found = []
    for wait_s, work_s in ((0.0, 0.0), (0.0, 2e-3), (8e-3, 2e-3), (12e-3, 2e-3), (0.0, 6e-3)):
        lent.lend(wait_s, work_s)
        found.append(lent.lasts)
    assert found == [False, True, True, False, False]
    lent.lend(0.0, 2e-3)
    lent.still()
    now[0] = 18_000_001  # the wait was longer than was thought
    with pytest.raises(Expired):
        lent.still()


def test_text_goes_on_beside_video_with_deadlines(worker: Peer, ring: Ring, tiny: Path) -> None:
    worker.load(tiny, key="t")
    worker.send("video.open", [ring.fd], **ring.message())
    worker.expect("video.ready")
    ring.put(0, 0)
    worker.send("frame", session="v", seq=0, slot=0, deadline_ns=1)
    worker.text("1", "Hello", model="t", max_tokens=10)
    seq, tokens = 0, 0
    # A frame waits at every moment; the text comes through all the same.
    while tokens < 10:
        message = worker.recv()
        tokens += message["t"] == "text.token"
        if message["t"] == "frame.done":
            seq += 1
            worker.send("frame", session="v", seq=seq, slot=0, deadline_ns=1)
    assert seq > 0


def test_closed_session_is_silent_and_frees_its_model(worker: Peer, ring: Ring) -> None:
    worker.send("video.open", [ring.fd], **ring.message())
    worker.expect("video.ready")
    worker.send("unload", model="m")
    worker.send("stats")
    assert worker.expect("stats")["models"] == ["m"]
    worker.send("close", session="v")
    worker.send("frame", session="v", seq=0, slot=0, deadline_ns=0)
    worker.send("stats")
    assert worker.recv()["models"] == []


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"models": ["nothing"]}, "UnknownModel"),
        ({"out": {"width": 39, "height": 60}}, "InvalidArgument"),
        ({"format": {"width": 40, "height": 31}}, "InvalidArgument"),
        ({"format": {}}, "InvalidArgument"),
        ({"layout": {}}, "Internal"),
    ],
)
def test_what_does_not_fit_is_refused(worker: Peer, ring: Ring, other: Any, error: str) -> None:
    worker.send("video.open", [ring.fd], **ring.message(**other))
    message = worker.error()
    assert (message["session"], message["error"]) == ("v", error)
    worker.send("video.open", [ring.fd], **ring.message())
    worker.expect("video.ready")
    worker.send("video.open", [ring.fd], **ring.message())
    assert worker.error()["error"] == "InvalidArgument"


def test_ring_that_could_shrink_is_refused(worker: Peer, ring: Ring) -> None:
    for seal, size in ((0, ring.layout.ring_bytes), (fcntl.F_SEAL_SHRINK, 4096)):
        fd = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
        worker.send("video.open", [fd], **ring.message())
        os.close(fd)
        assert worker.error()["error"] == "InvalidArgument"
    with MODEL.open("rb") as f:
        worker.send("video.open", [f.fileno()], **ring.message())
    assert worker.error()["error"] == "InvalidArgument"


def test_wrong_slot_ends_the_session(worker: Peer, ring: Ring) -> None:
    worker.send("video.open", [ring.fd], **ring.message())
    worker.expect("video.ready")
    worker.send("frame", session="v", seq=0, slot=SLOTS, deadline_ns=0)
    assert worker.error()["session"] == "v"


def test_device_lost_in_the_middle_of_a_video(peer: Start, ring: Ring) -> None:
    worker = peer(threads=1, faults=["cpu:device_lost:2"])
    worker.load(MODEL, kind="video")
    worker.send("video.open", [ring.fd], **ring.message(tile=32))
    worker.expect("video.ready")
    for slot in range(SLOTS):
        worker.send("frame", session="v", seq=slot, slot=slot, deadline_ns=0)
    worker.until("dying")
    assert worker.ended()[0] == 1


def test_inspect_tells_a_video_model(worker: Peer) -> None:
    with MODEL.open("rb") as f:
        worker.send("inspect", [f.fileno()], job="1")
    assert worker.expect("inspected")["info"]["kind"] == "video"


def test_inspect_finds_a_damaged_blob(worker: Peer, tmp_path: Path) -> None:
    data = bytearray(MODEL.read_bytes())
    data[8192] ^= 1  # the first blobs lie from 4096 on
    file = tmp_path / "damaged.pvrm"
    file.write_bytes(data)
    with file.open("rb") as f:
        worker.send("inspect", [f.fileno()], job="1")
    assert worker.error()["error"] == "BadModel"


def test_sessions_that_come_and_go_leave_time_to_others(
    worker: Peer, ring: Ring, tiny: Path
) -> None:
    """What waits to be opened takes no more of the time than slices do."""
    worker.load(tiny, "t")
    worker.text("j", "Once upon a time", model="t", max_tokens=12, temperature=0.0)
    worker.expect("text.token", n=0)
    worker.send("ack", job="j", n=1)
    for number in range(60):
        worker.send("video.open", [ring.fd], **ring.message(session=f"v{number}", measure=True))
    opened = 0
    while (message := worker.recv())["t"] != "text.end":
        assert message["t"] != "error", message
        opened += message["t"] == "video.ready"
    assert opened < 60
    for _ in range(60 - opened):
        worker.expect("video.ready")


def test_a_session_that_was_closed_before_its_turn_is_not_opened(
    worker: Peer, ring: Ring, tiny: Path
) -> None:
    worker.load(tiny, "t")
    worker.send("video.open", [ring.fd], **ring.message(session="first", measure=True))
    worker.text("j", "Once upon a time", model="t", max_tokens=12, temperature=0.0)
    for number in range(20):
        name = f"v{number}"
        worker.send("video.open", [ring.fd], **ring.message(session=name, measure=True))
        worker.send("close", session=name)
    worker.send("video.open", [ring.fd], **ring.message(session="last"))
    opened = [m["session"] for m in worker.until("video.ready", session="last") if "session" in m]
    assert len(opened) < 20
    worker.send("stats")
    assert worker.expect("stats")["jobs"] <= 3
