# SPDX-License-Identifier: Apache-2.0
"""Formats, layouts and cuts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.backends.base import DeviceInfo, Limits
from engine.errors import InvalidArgument
from engine.video import frames
from engine.video.frames import FrameFormat, Plane
from engine.video.tiles import plan


def test_example_of_the_architecture_page() -> None:
    fmt = FrameFormat(8, 6)
    planes = [(p.offset, p.stride, p.width, p.height) for p in fmt.planes()]
    assert planes == [(0, 64, 8, 6), (384, 64, 4, 3), (576, 64, 4, 3)]
    wide = [(p.offset, p.stride, p.width, p.height) for p in fmt.scaled(2).planes(4096)]
    assert wide == [(4096, 64, 16, 12), (4864, 64, 8, 6), (5248, 64, 8, 6)]


@pytest.mark.parametrize(
    ("pixel", "depth", "wanted"),
    [
        ("gray", 8, [(128, 65, 3)]),
        ("i420", 8, [(128, 65, 3), (64, 33, 2), (64, 33, 2)]),
        ("nv12", 8, [(128, 65, 3), (128, 66, 2)]),
        ("i444", 16, [(192, 65, 3)] * 3),
    ],
)
def test_odd_sizes(pixel: str, depth: int, wanted: list[tuple[int, int, int]]) -> None:
    fmt = FrameFormat(65, 3, pixel, depth)
    assert [(p.stride, p.width, p.height) for p in fmt.planes()] == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"width": 0, "height": 4},
        {"width": 4, "height": 16385},
        {"width": 4, "height": 4, "pixel": "rgb"},
        {"width": 4, "height": 4, "depth": 10},
        {"width": 4, "height": 4, "siting": "top"},
        {"width": "wide", "height": 4},
        {"height": 4},
    ],
)
def test_formats_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        FrameFormat.from_json(fields)


def test_planes_of_a_message_and_views_of_a_slot() -> None:
    fmt = FrameFormat.from_json({"width": 5, "height": 3, "pixel": "nv12", "siting": "centre"})
    layout = [vars(p) for p in fmt.planes()]
    assert frames.planes_of(layout, fmt) == fmt.planes()
    with pytest.raises(InvalidArgument):
        frames.planes_of(layout[:1], fmt)
    with pytest.raises(InvalidArgument):
        frames.planes_of([{"offset": 0}], fmt)
    memory = bytearray(4096 + 64 * 5)
    views = frames.views(memory, fmt.planes(), 4096)
    views[1][1, 2] = 7
    assert memory[4096 + 64 * 3 + 64 + 2] == 7
    with pytest.raises(InvalidArgument):
        frames.views(memory, fmt.planes(), 4097)


def test_samples_of_16_bits() -> None:
    plane = np.zeros((1, 64), np.uint8)
    plane[0, :4] = 1, 2, 3, 4
    assert frames.samples(plane, 2, 16).tolist() == [[0x0201, 0x0403]]


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (480, 270), (4097, 3), (7680, 4320), (16384, 1)])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("tile", [0, 1, 64, 100000])
def test_cuts_cover_the_frame_and_fit(size: tuple[int, int], kind: Any, tile: int) -> None:
    device = DeviceInfo(kind, "a device", "", False)
    t = plan(*size, 6, 8, device, tile)
    assert t.columns * t.tw >= size[0] > (t.columns - 1) * t.tw
    assert t.bands * t.th >= size[1] > (t.bands - 1) * t.th
    assert t.tw % 4 == 0
    assert t.th % 2 == 0
    assert t.xs >= t.tw + 12
    assert t.xs % 16 == 0
    assert 1 <= t.batch <= t.columns
    if tile < 100000:
        assert t.nbytes(8) <= device.limits.max_storage_range
    assert Plane(0, 64, 1, 3).nbytes == 192


def test_large_gpus_take_more_at_once() -> None:
    limits = Limits(
        max_workgroup_invocations=1024, max_shared_bytes=48 << 10, max_storage_range=4 << 30
    )
    small, large = DeviceInfo("gpu", "", "", False), DeviceInfo("gpu", "", "", False, limits)
    layered = [plan(1920, 1080, 13, 32, device) for device in (small, large)]
    assert (layered[0].tw, layered[0].th) == (layered[1].tw, layered[1].th)
    assert layered[0].batch < layered[1].batch == layered[1].columns
    fused = plan(1920, 1080, 7, 16, large, fused=True)
    assert (fused.bands, fused.batch) == (1, fused.columns)
    software = replace(large, software=True)
    assert plan(1920, 1080, 13, 32, software) == layered[0]


def test_frames_are_cut_coarsely_on_cpus_where_no_tile_is_kept() -> None:
    cpu = DeviceInfo("cpu", "", "", True, Limits(max_storage_range=1 << 62))
    fine, coarse = (plan(960, 540, 6, 8, cpu, fused=True, fine=fine) for fine in (True, False))
    assert (fine.tiles, coarse.tiles) == (12, 2)
    assert plan(960, 540, 7, 16, cpu, fused=True, fine=False).tiles == 4
    # A slice takes as many pixels at most, whatever the width: the narrower, the more rows.
    for width, height, tiles in ((640, 360, 1), (1280, 720, 4), (1920, 1080, 8), (64, 4000, 1)):
        t = plan(width, height, 6, 8, cpu, fused=True, fine=False)
        assert t.tiles == tiles
        assert t.tw * t.th <= 1024 * 288
    assert plan(960, 540, 6, 8, cpu, fused=True, fine=False, tile=64).tw == 64
