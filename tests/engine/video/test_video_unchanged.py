# SPDX-License-Identifier: Apache-2.0
"""Tiles that keep the last frame's result: never a wrong one, and as many as can be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.base import Backend
from engine.video import frames
from engine.video.frames import Bytes, FrameFormat
from engine.video.network import VideoModel
from engine.video.unchanged import BLOCK, RESTLESS
from engine.video.upscale import REUSED, VideoPipeline
from tests.engine.video.conftest import enlarge, noise, scene, synthetic

TILE = 32
FORMATS = [("i420", 8), ("nv12", 16), ("gray", 8), ("i444", 16)]


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory, cpu_backend: Backend) -> Iterator[VideoModel]:
    """A model whose chroma sees the luma."""
    folder: Path = tmp_path_factory.mktemp("models")
    file = synthetic(folder / "guided.pvrm", chroma={"channels": 8, "blocks": 1})
    found = VideoModel.load(str(file), cpu_backend)
    yield found
    found.close()


class Session:
    """Frames one after the other, in `slots` places by turns."""

    def __init__(
        self,
        backend: Backend,
        model: VideoModel,
        fmt: FrameFormat,
        slots: int,
        mode: str,
        tile: int = TILE,
    ) -> None:
        self.pipeline = VideoPipeline(backend, model, fmt, tile, unchanged=mode)
        self.places = [
            (frames.empty(fmt), frames.empty(fmt.scaled(model.scale))) for _ in range(slots)
        ]
        self.count = 0

    def run(self, src: list[Bytes]) -> list[Bytes]:
        given, out = self.places[self.count % len(self.places)]
        self.count += 1
        for place, plane in zip(given, src, strict=True):
            place[:] = plane
        self.pipeline.begin(given, out)
        while not self.pipeline.step():
            pass
        return out


def same(fmt: FrameFormat, out: list[Bytes], want: list[Any]) -> bool:
    planes = fmt.scaled(2).planes()
    return all(
        np.array_equal(frames.samples(o, p.width, fmt.depth), w)
        for o, p, w in zip(out, planes, want, strict=True)
    )


@pytest.mark.parametrize(("pixel", "depth"), FORMATS)
@pytest.mark.parametrize("slots", [1, 3])
def test_results_are_those_of_a_frame_alone(
    cpu_backend: Backend, guided: VideoModel, pixel: str, depth: int, slots: int
) -> None:
    fmt = FrameFormat(101, 70, pixel, depth)
    rng = np.random.default_rng(1)
    session = Session(cpu_backend, guided, fmt, slots, "exact")
    src = noise(fmt)
    reused = 0
    for number in range(12):
        if number % 3:
            # A sample somewhere, also beside a tile's border and in the last column.
            plane = int(rng.integers(len(src)))
            p = fmt.planes()[plane]
            x = int(rng.choice([0, 31, 32, p.width - 1])) % p.width
            part = frames.samples(src[plane], p.width, depth)
            part[int(rng.integers(p.height)), x] ^= 1
        out = session.run(src)
        assert same(fmt, out, enlarge(cpu_backend, guided, fmt, src, TILE)), number
        assert session.pipeline.tiles == session.pipeline.tiling.tiles
        reused += session.pipeline.tiles_reused
    assert reused > 4 * session.pipeline.tiling.tiles


def test_still_frames_cost_nothing(cpu_backend: Backend, guided: VideoModel) -> None:
    fmt = FrameFormat(100, 64)
    session = Session(cpu_backend, guided, fmt, 2, "exact")
    src = noise(fmt)
    session.run(src)
    before = cpu_backend.counters()["submissions"]
    for _ in range(3):
        out = session.run(src)
        assert session.pipeline.tiles_reused == session.pipeline.tiling.tiles
    assert cpu_backend.counters()["submissions"] == before
    assert same(fmt, out, enlarge(cpu_backend, guided, fmt, src))


def test_a_change_between_two_bands_reaches_both(cpu_backend: Backend, guided: VideoModel) -> None:
    fmt = FrameFormat(32, 64)
    session = Session(cpu_backend, guided, fmt, 1, "exact")
    src = noise(fmt)
    session.run(src)
    src[0][31, 5] ^= 255
    out = session.run(src)
    assert session.pipeline.tiles_reused == 0
    assert same(fmt, out, enlarge(cpu_backend, guided, fmt, src))
    src[0][10, 5] ^= 255
    session.run(src)
    assert session.pipeline.made_by[1, 0] == REUSED


def test_a_frame_that_was_given_up_is_forgotten(cpu_backend: Backend, guided: VideoModel) -> None:
    fmt = FrameFormat(100, 64)
    session = Session(cpu_backend, guided, fmt, 1, "exact")
    src = noise(fmt)
    session.run(src)
    other = noise(fmt, 1)
    session.pipeline.begin(other, session.places[0][1])
    session.pipeline.step()
    out = session.run(src)
    assert session.pipeline.tiles_reused == 0
    assert same(fmt, out, enlarge(cpu_backend, guided, fmt, src))


def test_what_was_interpolated_is_computed_the_next_time(
    cpu_backend: Backend, guided: VideoModel
) -> None:
    fmt = FrameFormat(64, 96, "gray")
    session = Session(cpu_backend, guided, fmt, 1, "exact")
    src = noise(fmt)
    session.pipeline.begin(*(session.places[0]))
    while session.pipeline.rows_done == 0:
        session.pipeline.step()
    session.pipeline.abandon()
    assert session.pipeline.tiles_fallback == 4
    out = session.run(src)
    assert session.pipeline.tiles_reused == 0
    assert same(fmt, out, enlarge(cpu_backend, guided, fmt, src))


@pytest.mark.parametrize("depth", [8, 16])
def test_noise_is_not_a_change_but_an_edge_is(
    cpu_backend: Backend, guided: VideoModel, depth: int
) -> None:
    fmt = FrameFormat(96, 64, "i420", depth)
    unit = 1 if depth == 8 else 257
    rng = np.random.default_rng(2)
    session = Session(cpu_backend, guided, fmt, 2, "tolerant")

    def shot(level: float = 0, shift: int = 0) -> list[Bytes]:
        src = frames.empty(fmt)
        for plane, p in zip(src, fmt.planes(), strict=True):
            clean = scene(p.height, p.width + 4)[:, shift : shift + p.width] + level
            grain = rng.normal(0, 2.5, clean.shape)
            view = frames.samples(plane, p.width, depth)
            view[:] = np.clip(np.round(clean + grain), 0, 255) * unit
        return src

    tiles = session.pipeline.tiling.tiles
    session.run(shot())
    for _ in range(4):
        session.run(shot())
        assert session.pipeline.tiles_reused == tiles
    session.run(shot(shift=1))
    assert session.pipeline.tiles_reused < tiles
    session.run(shot())
    # A slow change adds up against what was computed, however small its steps.
    reused, computed = [], np.zeros_like(session.pipeline.made_by, bool)
    for step in range(1, 10):
        session.run(shot(level=step * 0.4))
        reused.append(session.pipeline.tiles_reused)
        computed |= session.pipeline.made_by != REUSED
    assert reused[0] == tiles
    assert computed.all()
    one = shot()
    session.run(one)
    first = frames.samples(one[0], fmt.width, depth)
    first[8 : 8 + BLOCK, 8] = 0
    session.run(one)
    assert session.pipeline.made_by[0, 0] != REUSED
    assert session.pipeline.tiles_reused == tiles - 1


@pytest.mark.parametrize("mode", ["exact", "tolerant"])
def test_what_always_changes_is_not_kept_until_it_stands_still(
    cpu_backend: Backend, guided: VideoModel, mode: str
) -> None:
    fmt = FrameFormat(100, 64)
    session = Session(cpu_backend, guided, fmt, 2, mode)
    for number in range(RESTLESS + 3):
        src = noise(fmt, number)
        session.run(src)
        assert session.pipeline.tiles_reused == 0
    kept = session.pipeline._unchanged._input[0]  # type: ignore[union-attr]
    assert not np.array_equal(kept[:, :100], src[0][:, :100])
    moving = noise(fmt, 100)
    still = session.pipeline.tiling.tw  # from the first tile's border on, and its windows' reach
    for number in range(3):  # half of the picture stands still from here on
        for plane, other in zip(src, noise(fmt, 200 + number), strict=True):
            plane[:] = other
        for plane, other in zip(src, moving, strict=True):
            plane[:, still:] = other[:, still:]
        out = session.run(src)
        reused = session.pipeline.tiles_reused
        assert (reused > 0) == (number == 2)
        if mode == "exact":
            assert same(fmt, out, enlarge(cpu_backend, guided, fmt, src, TILE))


def test_cuts_are_coarse_while_everything_changes(
    cpu_backend: Backend, guided: VideoModel
) -> None:
    fmt = FrameFormat(101, 230)
    session = Session(cpu_backend, guided, fmt, 2, "exact", 0)
    pipeline, tiles, reused = session.pipeline, [], []
    for number in range(RESTLESS + 8):
        if number < RESTLESS + 3:
            src = noise(fmt, number)
        out = session.run(src)
        assert same(fmt, out, enlarge(cpu_backend, guided, fmt, src))
        assert pipeline.made_by.shape == (pipeline.tiling.bands, pipeline.tiling.columns)
        tiles.append(pipeline.tiles)
        reused.append(pipeline.tiles_reused)
    fine, coarse = tiles[0], tiles[RESTLESS + 2]
    assert fine > coarse == 1
    assert tiles[-4:] == reused[-4:] == [fine] * 4
    src[0][0, 0] ^= 1
    assert same(fmt, session.run(src), enlarge(cpu_backend, guided, fmt, src))
    assert 0 < pipeline.tiles_reused < fine


@pytest.mark.long
@pytest.mark.parametrize("mode", ["exact", "tolerant", "off"])
def test_memory_stays_what_it_is(cpu_backend: Backend, guided: VideoModel, mode: str) -> None:
    fmt = FrameFormat(160, 96)
    session = Session(cpu_backend, guided, fmt, 3, mode)
    src = noise(fmt)
    before = 0
    for number in range(600):
        src[0][number % 96, :] = number % 251
        session.run(src)
        if number == 100:
            before = resident()
    assert resident() - before < 4 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_off_computes_everything(cpu_backend: Backend, guided: VideoModel) -> None:
    session = Session(cpu_backend, guided, FrameFormat(40, 40), 1, "off")
    src = noise(FrameFormat(40, 40))
    for _ in range(2):
        session.run(src)
        assert session.pipeline.tiles_reused == 0
