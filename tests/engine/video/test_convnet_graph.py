# SPDX-License-Identifier: Apache-2.0
"""The graph of other people's networks: passes, where values lie, what a compiled file may say."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from engine.backends import profiles
from engine.backends.base import DeviceInfo
from engine.errors import BadModel, InvalidArgument, UnsupportedModel
from engine.video import convnet_pack
from engine.video.convnet import prepared
from engine.video.convnet_builder import Builder
from engine.video.convnet_colour import planes
from engine.video.convnet_graph import INPUT, Net
from engine.video.convnet_layout import buffers, layout
from engine.video.convnet_lower import PART_MACS, lower, plan
from engine.video.convnet_windows import windows
from engine.video.frames import FrameFormat
from kernels.maps import THIN, WIDE
from tests.engine.networks import evaluate, weights

RNG = np.random.default_rng(3)
IMAGE = RNG.random((3, 6, 8)).astype(np.float32)


def dense(parts: int = 3, width: int = 32, grow: int = 16) -> Net:
    """A block of ESRGAN's kind: each convolution sees all before it."""
    b = Builder(3)
    seen = [b.conv("first", "Conv", INPUT, weights(RNG, width, 3, 3), None, pads=(1,) * 4)]
    for i in range(parts):
        joined = b.concat(f"cat{i}", "Concat", seen)
        channels = b.values[joined].channels
        made = b.conv(f"c{i}", "Conv", joined, weights(RNG, grow, channels, 3), None, pads=(1,) * 4)
        seen.append(b.act(f"a{i}", "LeakyRelu", made, "slope", 0.2))
    joined = b.concat("cat", "Concat", seen)
    w = weights(RNG, width, b.values[joined].channels, 3)
    last = b.conv("last", "Conv", joined, w, None, pads=(1,) * 4)
    out = b.sum("sum", "Add", last, seen[0], 0.2)
    out = b.conv("out", "Conv", out, weights(RNG, 12, width, 1), None)
    return b.finish(b.shuffle("shuffle", "DepthToSpace", out, 2))


def test_dense_blocks_join_without_a_copy() -> None:
    net = prepared(dense())
    made = layout(net)
    assert all(not copies for copies in made.copies.values())
    joined = [n for n in net.nodes if n.op == "concat"]
    assert len({made.places[n.output].group for n in joined}) == 1
    assert [made.forms[n.output].blocks for n in joined] == [3, 4, 5]
    np.testing.assert_allclose(evaluate(net, IMAGE), evaluate(dense_again(net), IMAGE), rtol=1e-5)


def dense_again(net: Net) -> Net:
    """The network as its file would give it back, with its arrays."""
    data = json.loads(json.dumps(net.to_json()))
    found = Net.from_json(data)
    return Net(found.nodes, found.values, net.arrays, found.output, found.log)


def test_buffers_are_used_again() -> None:
    b = Builder(1)
    x = b.conv("first", "Conv", INPUT, weights(RNG, 32, 1, 3), None, pads=(1,) * 4)
    for i in range(6):
        x = b.conv(f"c{i}", "Conv", x, weights(RNG, 32, 32, 3), None, pads=(1,) * 4)
    net = prepared(b.finish(b.conv("out", "Conv", x, weights(RNG, 1, 32, 1), None)))
    held = buffers(net, layout(net))
    assert sorted(held.kinds) == [
        (Fraction(1), THIN),
        (Fraction(1), WIDE),
        (Fraction(1), WIDE),
    ] or (len(held.kinds) == 4)
    assert held.blocks.count(2) == 2


def test_parts_that_do_not_fill_blocks_have_gaps() -> None:
    b = Builder(3)
    a = b.conv("a", "Conv", INPUT, weights(RNG, 20, 3, 3), None, pads=(1,) * 4)
    c = b.conv("c", "Conv", a, weights(RNG, 12, 20, 3), None, pads=(1,) * 4)
    joined = b.concat("cat", "Concat", [a, c, INPUT])
    twice = b.sum("sum", "Add", joined, joined)  # what is no convolution needs them moved
    cut = b.slice("cut", "Slice", twice, 5, 21)
    net = b.finish(b.conv("out", "Conv", cut, weights(RNG, 3, 16, 1), None))
    ready = prepared(net)
    np.testing.assert_allclose(evaluate(ready, IMAGE), evaluate(net, IMAGE), rtol=1e-5, atol=1e-6)
    made = layout(ready)
    form = made.forms[joined]
    assert (form.blocks, form.channels[20], form.channels[32]) == (4, 32, 48)
    names = [n.name for n in ready.nodes if n.op == "conv"]
    assert names == ["a", "c", "sum.moved", "cut", "out"]


def test_a_value_in_two_places_is_copied() -> None:
    b = Builder(3)
    a, c = (
        b.conv(n, "Conv", INPUT, weights(RNG, 16, 3, 3), None, pads=(1,) * 4) for n in ("a", "c")
    )
    one, two = b.concat("ac", "Concat", [a, c]), b.concat("ca", "Concat", [c, a])
    both = [b.conv("o", "Conv", v, weights(RNG, 3, 32, 1), None) for v in (one, two)]
    net = prepared(b.finish(b.sum("sum", "Add", *both)))
    made = layout(net)
    assert sorted(len(v) for v in made.copies.values()) == [0, 2]
    assert convnet_pack.COPY in convnet_pack.sizes(net, made, "f16")


Edit = Callable[[dict[str, Any]], None]


def _set(index: int, key: str, value: Any) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        data["nodes"][index][5][key] = value

    return edit


def _input(index: int, value: str) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        data["nodes"][index][2][0] = value

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data.pop("values"),
        lambda data: data.update(output="v99"),
        lambda data: data["nodes"].reverse(),
        lambda data: data["nodes"][0].__setitem__(1, "sort"),
        lambda data: data["values"].update(v0=[5000, 1, 1]),
        lambda data: data["values"].update(v0=[32, 1, 0]),
        lambda data: data["values"].pop(INPUT),
        _set(0, "k", 4),
        _set(0, "k", 99),
        _set(0, "cout", 16),
        _set(0, "act", "gate"),
        _set(0, "residual", True),
        _set(-1, "s", 3),
        _input(1, "v9"),
    ],
)
def test_a_compiled_network_that_does_not_hold_together(edit: Edit) -> None:
    data = copy.deepcopy(prepared(dense()).to_json())
    edit(data)
    with pytest.raises((BadModel, UnsupportedModel)):
        Net.from_json(data)


@pytest.mark.parametrize("name", profiles.names())
def test_programs_keep_to_every_profile(name: str) -> None:
    profile = profiles.load(name)
    device = DeviceInfo("gpu", name, "", False, profile.alone(), profile.features)
    given = plan(prepared(dense(3, 64, 32)), "q8")
    cut = windows(given, 1920, 1080, device)
    for pixel in ("i420", "nv12", "i444a", "gray"):
        shown = planes(FrameFormat(1920, 1080, pixel), 2, 3)
        program = lower(given, shown, cut.width, cut.height, device, PART_MACS)
        most = device.limits.max_storage_range
        assert all(b.nbytes <= most for b in program.buffers.values())
        assert {c.variant for calls in program.sequences.values() for c in calls} <= {
            "base", "f16", "q8",
        }  # fmt: skip


def test_windows_cover_the_frame_and_overlap() -> None:
    given = plan(prepared(dense()), "f16")
    device = DeviceInfo("cpu", "", "", True)
    for width, height, tile, overlap in ((101, 67, 32, 4), (64, 64, 16, 0), (7, 5, 8, 2)):
        cut = windows(given, width, height, device, tile, overlap)
        for axis, size, length in ((cut.columns, width, cut.width), (cut.rows, height, cut.height)):
            assert axis[0].core == 0
            assert axis[-1].end == size
            for one, two in pairwise(axis):
                assert one.end == two.core
            for c in axis:
                assert c.begin % 2 == 0
                assert c.begin <= max(0, c.core - cut.overlap)
                assert c.begin + length >= min(size, c.end + cut.overlap)
    assert windows(given, 64, 64, device).tiles == 1


def test_a_device_without_memory_says_so() -> None:
    profile = profiles.load(profiles.names()[0])
    limits = profile.alone().__class__(max_storage_range=4096)
    device = DeviceInfo("gpu", "tiny", "", False, limits)
    with pytest.raises(InvalidArgument, match="does not fit"):
        windows(plan(prepared(dense()), "f16"), 64, 64, device)
