# SPDX-License-Identifier: Apache-2.0
"""Frames in memory that the device was told of: no copy by the host, and the same results."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.video import frames, plain
from engine.video.frames import Bytes, FrameFormat
from engine.video.network import VideoModel
from engine.video.upscale import Planes, VideoPipeline
from tests.engine.video.conftest import FAST, scene

FORMAT = FrameFormat(288, 240)
SLOTS, PAGE = 3, 4096


@pytest.fixture(scope="module")
def far() -> Iterator[Any]:
    """A GPU whose memory the host does not see."""
    from engine.backends.vulkan import VulkanBackend

    # Profiles import no host memory.
    backend = VulkanBackend(allow_software=True, force_staging=True, profile="")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def far_model(far: Any) -> Iterator[VideoModel]:
    found = VideoModel.load(str(FAST), far)
    yield found
    found.close()


class Ring:
    """Slots as the daemon lays them out."""

    def __init__(self, slots: int = SLOTS) -> None:
        planes, wide = FORMAT.planes(), FORMAT.scaled(2).planes()
        inside = -(-(planes[-1].offset + planes[-1].nbytes) // PAGE) * PAGE
        each = inside + -(-(wide[-1].offset + wide[-1].nbytes) // PAGE) * PAGE
        fd = os.memfd_create("ring")
        os.ftruncate(fd, slots * each)
        self.memory = np.frombuffer(mmap.mmap(fd, slots * each), np.uint8)
        os.close(fd)
        self.slots = [
            (
                frames.views(self.memory, planes, i * each),
                frames.views(self.memory, FORMAT.scaled(2).planes(inside), i * each),
            )
            for i in range(slots)
        ]


def picture(seed: int) -> list[Bytes]:
    luma = scene(FORMAT.height, FORMAT.width, seed).astype(np.uint8)
    planes = frames.empty(FORMAT)
    for plane in planes:
        plane[:] = 100 + seed
    planes[0][:, : FORMAT.width] = luma
    return planes


def run(pipeline: VideoPipeline, src: list[Bytes], dst: list[Bytes] | Planes) -> None:
    pipeline.begin(src, dst)
    while not pipeline.step():
        pass


def result(pipeline: VideoPipeline, src: list[Bytes], dst: list[Bytes]) -> list[Bytes]:
    """What a pipeline makes of a picture in a slot, whose destination is blank again after it."""
    for place, plane in zip(src, picture(1), strict=True):
        place[:] = plane
    run(pipeline, src, dst)
    made = [plane.copy() for plane in dst]
    for plane in dst:
        plane[:] = 0
    return made


def counted(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each submission from now on."""
    submissions: list[int] = []
    submit = gpu._submit
    monkeypatch.setattr(gpu, "_submit", lambda *given: (submissions.append(1), submit(*given))[1])
    return submissions


def same(planes: list[Bytes], want: list[Bytes]) -> bool:
    wide = FORMAT.scaled(2).planes()
    return all(
        np.array_equal(a[:, : p.width], b[:, : p.width])
        for a, b, p in zip(planes, want, wide, strict=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [0, 96])
@pytest.mark.parametrize("slots", [1, SLOTS])
def test_results_are_the_same_and_nothing_large_is_copied(
    far: Any, far_model: VideoModel, gpu_model: VideoModel, tile: int, slots: int
) -> None:
    ring = Ring(slots)
    adopted = far.adopt(ring.memory)
    pipeline = VideoPipeline(far, far_model, FORMAT, tile, unchanged="exact")
    other = VideoPipeline(gpu_model.backend, gpu_model, FORMAT, tile)
    before = far.counters()
    for number in range(5):
        src, dst = ring.slots[number % slots]
        if number != 3:  # that one is as the one before
            given = picture(number)
        if number == 4:
            given = [plane.copy() for plane in given]
            given[0][5:9, 5:9] ^= 255  # a few tiles change
        for place, plane in zip(src, given, strict=True):
            place[:] = plane
        run(pipeline, src, dst)
        want = frames.empty(FORMAT.scaled(2))
        run(other, given, want)
        assert same(dst, want), number
        after = far.counters()
        if number < 3:
            assert after["copies"] == before["copies"], number
            assert after["bytes_direct"] > before["bytes_direct"]
        before = after
    pipeline.close()
    other.close()
    adopted.close()


class Lent(Planes):
    """Planes that the device must not write to by itself."""

    def place(self, plane: int, begin: int, end: int) -> None:
        return None


@pytest.mark.gpu
def test_where_the_device_may_not_write_the_host_copies_in_the_same_submission(
    far: Any, far_model: VideoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring(1)
    adopted = far.adopt(ring.memory)
    pipeline = VideoPipeline(far, far_model, FORMAT)
    src, dst = ring.slots[0]
    want = result(pipeline, src, dst)
    submissions = counted(far, monkeypatch)
    lent = Lent(dst, [p.width for p in FORMAT.scaled(2).planes()])
    pipeline.begin(src, lent)
    while not pipeline.step():
        pass
    assert same(dst, want)
    assert len(submissions) == pipeline.slices
    pipeline.close()
    adopted.close()


@pytest.mark.gpu
def test_wrong_tiles_are_mended_where_they_lie(
    far: Any, far_model: VideoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring(1)
    adopted = far.adopt(ring.memory)
    pipeline = VideoPipeline(far, far_model, FORMAT, 96)
    src, dst = ring.slots[0]
    good = result(pipeline, src, dst)
    inner = pipeline.executable.run

    def wrong(*sequences: str, **named: Any) -> Any:
        stats = inner(*sequences, **named)
        if named.get("into"):
            named["into"]["out0"][:, :100] = 0
        return stats

    monkeypatch.setattr(pipeline.executable, "run", wrong)
    calls = []
    redo = pipeline._spare.redo  # type: ignore[union-attr]
    monkeypatch.setattr(
        pipeline._spare, "redo", lambda *given: (calls.append(given[2]), redo(*given))[1]
    )
    run(pipeline, src, dst)
    assert calls
    assert pipeline.tiles_cpu + pipeline.tiles_fallback >= len(calls)
    for a, b in zip(dst, good, strict=True):
        difference = a.astype(int) - b
        assert np.abs(difference[:, : FORMAT.width]).max() <= 1
    pipeline.close()
    adopted.close()


class Claimed(Planes):
    """Planes that the device may write to in a submission that does nothing else."""

    claims = True
    looked: list[int]  # submissions before each look at the clock

    def place(self, plane: int, begin: int, end: int) -> Bytes | None:
        self.looked.append(self.made())
        return super().place(plane, begin, end)

    def made(self) -> int:
        return 0


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [False, True])
def test_a_lent_frame_is_brought_alone_after_a_look_at_the_clock(
    far: Any, far_model: VideoModel, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    ring = Ring(1)
    adopted = far.adopt(ring.memory)
    pipeline = VideoPipeline(far, far_model, FORMAT)
    src, dst = ring.slots[0]
    want = result(pipeline, src, dst)
    lent = Claimed(dst, [p.width for p in FORMAT.scaled(2).planes()])
    lent.looked, begin = [], far.counters()
    submissions = counted(far, monkeypatch)
    monkeypatch.setattr(lent, "made", lambda: len(submissions))
    put: list[int] = []
    monkeypatch.setattr(
        lent, "put", lambda plane, at, rows: (put.append(plane), Planes.put(lent, plane, at, rows))
    )
    if wrong:  # a tile that is mended is put, with a look of its own
        found = iter([[0], []])
        monkeypatch.setattr(plain, "implausible", lambda *_: next(found, []))
    pipeline.begin(src, lent)
    while not pipeline.step():
        pass
    after = far.counters()
    assert after["copies"] == begin["copies"] or wrong
    bands = pipeline.tiling.bands
    assert len(submissions) == pipeline.slices + bands
    assert lent.looked[::3] == [
        (band + 1) * pipeline.slices // bands + band for band in range(bands)
    ]
    if wrong:
        assert put[:3] == [0, 1, 2]
        wide = dst[0][:, : 2 * FORMAT.width].astype(int)
        assert np.abs(wide - want[0][:, : 2 * FORMAT.width]).max() <= 1  # the CPU's own rounding
    else:
        assert same(dst, want)
        assert not put
    pipeline.close()
    adopted.close()


@pytest.mark.gpu
@pytest.mark.parametrize("over", [False, True])
def test_where_there_is_time_a_lent_frame_comes_with_the_work(
    far: Any, far_model: VideoModel, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    ring = Ring(1)
    adopted = far.adopt(ring.memory)
    pipeline = VideoPipeline(far, far_model, FORMAT)
    src, dst = ring.slots[0]
    want = result(pipeline, src, dst)
    lent = Claimed(dst, [p.width for p in FORMAT.scaled(2).planes()])
    lent.looked, lent.lasts, begin = [], True, far.counters()
    submissions, asked = counted(far, monkeypatch), []

    def still() -> None:
        asked.append(len(submissions))
        if over:
            raise RuntimeError("over")

    monkeypatch.setattr(lent, "still", still)
    if over:
        with pytest.raises(RuntimeError, match="over"):
            run(pipeline, src, lent)
        pipeline.abandon()
        assert not dst[0].any()
    else:
        run(pipeline, src, lent)
        assert same(dst, want)
        assert len(submissions) == pipeline.slices
        assert far.counters()["copies"] == begin["copies"]
    # Right before the submission that may write there, each time.
    assert set(asked) <= set(range(pipeline.slices))
    assert asked
    run(pipeline, src, dst)
    assert same(dst, want)
    pipeline.close()
    adopted.close()


@pytest.mark.gpu
def test_the_hosts_part_of_a_frame_may_come_later(
    far: Any, far_model: VideoModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = Ring(1)
    adopted = far.adopt(ring.memory)
    pipeline = VideoPipeline(far, far_model, FORMAT, unchanged="exact")
    src, dst = ring.slots[0]
    want = result(pipeline, src, dst)
    pipeline.later, looked, held = True, [], plain.implausible
    monkeypatch.setattr(plain, "implausible", lambda *g: (looked.append(1), held(*g))[1])
    pipeline.abandon()
    pipeline.abandon()
    run(pipeline, src, dst)
    assert pipeline.unsettled
    assert pipeline.step()  # again and again
    assert len(looked) == pipeline.tiling.bands - 1
    submissions = counted(far, monkeypatch)
    pipeline.settle()
    pipeline.settle()
    assert len(looked) == pipeline.tiling.bands
    assert not submissions
    assert same(dst, want)
    assert (pipeline.tiles, pipeline.tiles_fallback) == (pipeline.tiling.tiles, 0)
    run(pipeline, src, dst)  # what lies there is kept
    pipeline.settle()
    assert pipeline.tiles_reused == pipeline.tiling.tiles
    src[0][:] ^= 1
    run(pipeline, src, dst)
    pipeline.abandon()
    pipeline.abandon()  # nothing of it is kept
    assert not pipeline.unsettled
    run(pipeline, src, dst)
    pipeline.settle()
    assert pipeline.tiles_reused == 0
    pipeline.close()
    adopted.close()
