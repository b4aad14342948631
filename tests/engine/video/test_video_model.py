# SPDX-License-Identifier: Apache-2.0
"""Model files: what ships, what is refused, and the Program that comes of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import pvrm
from engine.backends.base import Backend
from engine.backends.null import NullBackend
from engine.errors import BadModel, InvalidArgument, UnsupportedModel
from engine.video.frames import FrameFormat
from engine.video.lowering import lower
from engine.video.network import Networks, Shape, VideoModel, build_graph, inspect
from engine.video.tiles import Tiling, plan
from tests.engine.video.conftest import FAST, MODELS


def rewrite(path: Path, target: Path, metadata: dict[str, Any], **blobs: Any) -> Path:
    """A copy of a model file with other metadata or blobs; a blob of None is left out."""
    file = pvrm.Pvrm.open(path)
    arrays = {name: file.blob(name) for name in file} | blobs
    kept = [pvrm.array_blob(n, a) for n, a in arrays.items() if a is not None]
    pvrm.write(target, {**file.metadata, **metadata}, kept)
    return target


TIERS = {"fast": (8, 4), "balanced": (16, 5), "quality": (32, 11)}


@pytest.mark.parametrize("file", sorted(MODELS.glob("*.pvrm")), ids=lambda file: str(file.stem))
def test_shipped_models(file: Path, cpu_backend: Backend) -> None:
    model = VideoModel.load(str(file), cpu_backend)
    info, words = inspect(str(file)), file.stem.split("-")
    scale = int(words[2][1:]) if words[2:] and words[2][1:].isdigit() else 2
    assert (info["name"], info["scale"]) == (file.stem, scale)
    assert (info["channels"], info["blocks"]) == TIERS[words[1]]
    assert info["licence"] == "Apache-2.0"
    assert model.networks.guided("half")  # its chroma sees the luma
    model.close()


def test_every_tier_has_every_scale() -> None:
    names = {file.stem for file in MODELS.glob("*.pvrm")}
    assert names > {f"nsr-{tier}{more}" for tier in TIERS for more in ("", "-x3", "-x4")}
    assert sum(file.stat().st_size for file in MODELS.glob("*.pvrm")) < 3 << 20


def test_load_by_descriptor(cpu_backend: Backend) -> None:
    fd = os.open(FAST, os.O_RDONLY)
    seen: list[float] = []
    model = VideoModel.load(fd, cpu_backend, seen.append)
    os.fstat(fd)  # still the caller's
    os.close(fd)
    assert seen[-1] == 1.0
    assert model.networks.halo == 6
    assert model.info["nbytes"] == model.weights.nbytes() > 10000
    model.close()


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ({"kind": "text"}, UnsupportedModel),
        ({"arch": "other"}, UnsupportedModel),
        ({"scale": 5}, UnsupportedModel),
        ({"scale": 3}, BadModel),  # other sizes of the last blobs
        ({"skips": [[2, 1]]}, BadModel),
        ({"skips": [[0, 5]]}, BadModel),  # the last convolution has other channels
        ({"skips": [[0, 3]]}, BadModel),  # the slopes are missing
        ({"chroma": {"channels": 8, "blocks": 0}}, BadModel),
        ({"channels": 12}, UnsupportedModel),
        ({"channels": "8"}, BadModel),
        ({"blocks": 5}, BadModel),  # a blob is missing, and conv5 has another size
    ],
)
def test_metadata_that_is_refused(
    tmp_path: Path, metadata: dict[str, Any], error: type[Exception]
) -> None:
    path = rewrite(FAST, tmp_path / "m.pvrm", metadata)
    with pytest.raises(error):
        VideoModel.load(str(path), NullBackend())


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    bad = np.full(100, np.nan, np.float32)
    with pytest.raises(BadModel, match="finite"):
        VideoModel.load(str(rewrite(FAST, tmp_path / "a.pvrm", {}, base=bad)), NullBackend())
    path = rewrite(FAST, tmp_path / "b.pvrm", {}, **{"chroma.left": None})
    with pytest.raises(BadModel, match=r"chroma\.left"):
        VideoModel.load(str(path), NullBackend())
    data = bytearray(FAST.read_bytes())
    data[4100] ^= 1
    (tmp_path / "c.pvrm").write_bytes(data)
    with pytest.raises(BadModel):
        VideoModel.load(str(tmp_path / "c.pvrm"), NullBackend())


def test_program_keeps_to_the_baseline(model: VideoModel) -> None:
    device = NullBackend().info
    fmt = FrameFormat(7680, 4320, "i444", 16)
    tiling = plan(7680, 4320, 6, 8, device)
    program = lower(model.networks, device, fmt, tiling)
    assert [c.op for c in program.sequences["planes"]] == ["filter_out"] * 2
    ops = [c.op for c in program.sequences["tiles"]]
    assert ops == ["luma_in", *["conv3x3"] * 6, "shuffle_out"]
    for call in program.sequences["tiles"] + program.sequences["planes"]:
        assert len(call.bindings) <= 4
        assert len(call.push) <= 128
        read, written = call.bindings[0], call.bindings[-1]
        assert read.buffer != written.buffer
    assert max(b.nbytes for b in program.buffers.values()) <= device.limits.max_storage_range


def test_band_that_fits_no_binding() -> None:
    graph = build_graph(Shape(1, 8, 4, 2))
    sizes = {name: 4 * w.shape[1] for name, w in graph.weights.items()}
    tiling = Tiling(16384, 16384, 6, 8, 16384, 16384, 1)
    fmt = FrameFormat(16384, 16384, "gray")
    with pytest.raises(InvalidArgument, match="smaller tiles"):
        lower(Networks(graph, {}, sizes), NullBackend().info, fmt, tiling)
