# SPDX-License-Identifier: Apache-2.0
"""Frames and pictures through other people's networks, against numpy."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from engine.backends.base import Backend
from engine.backends.crosscheck import CheckedBackend
from engine.errors import BadModel, PvrError, UnsupportedModel
from engine.importers import convnets
from engine.pace import LIMIT
from engine.pvrm import Pvrm
from engine.video import convnet, frames, kinds
from engine.video.convnet import ConvModel
from engine.video.convnet_colour import MATRICES
from engine.video.convnet_graph import Net
from engine.video.convnet_run import ConvPipeline
from engine.video.frames import Bytes, FrameFormat
from engine.video.picture import PictureJob
from tests.engine import networks
from tests.engine.networks import evaluate, node, weights

Array = npt.NDArray[Any]


def file(channels: int, scale: int = 2, seed: int = 1) -> bytes:
    """An ONNX network that adds a little to the nearest neighbour: its results stay pictures."""
    rng = np.random.default_rng(seed)
    n = channels * scale * scale
    scales = np.array([1, 1, scale, scale], np.float32)
    return networks.onnx(
        [
            node("Conv", "x w0 b0", "a", pads=[1, 1, 1, 1]),
            node("PRelu", "a slope", "b"),
            node("Conv", "b w1", "c", pads=[2, 2, 2, 2]),
            node("Sigmoid", "c", "s"),
            node("Mul", "c s", "d"),
            node("Conv", "d w2", "e", pads=[1, 1, 1, 1]),
            node("DepthToSpace", "e", "f", blocksize=scale, mode="CRD"),
            node("Resize", "x - scales", "g", mode="linear"),
            node("Add", "f g", "y"),
        ],
        {
            "w0": weights(rng, 20, channels, 3),
            "b0": networks.random(rng, 20, scale=0.1),
            "slope": networks.random(rng, 20, 1, 1),
            "w1": weights(rng, 24, 20, 5),
            "w2": 0.1 * weights(rng, n, 24, 3),
            "scales": scales,
        },
        channels,
    )


def fd_of(data: bytes) -> int:
    fd = os.memfd_create("model")
    os.write(fd, data)
    return fd


def load(backend: Backend, data: bytes, cache: str = "") -> tuple[ConvModel, Net]:
    fd = fd_of(data)
    try:
        model = ConvModel.load(fd, backend, cache=cache)
        return model, convnets.load_fd(fd)
    finally:
        os.close(fd)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)], scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.getfixturevalue(f"{request.param}_backend")
    return found


@pytest.fixture(scope="module")
def colour(backend: Backend) -> Iterator[tuple[ConvModel, Net]]:
    model, net = load(backend, file(3))
    yield model, net
    model.close()


@pytest.fixture(scope="module")
def luma(backend: Backend) -> Iterator[tuple[ConvModel, Net]]:
    model, net = load(backend, file(1))
    yield model, net
    model.close()


def run(pipeline: ConvPipeline, src: list[Bytes]) -> list[Array]:
    dst = frames.empty(pipeline.out_format)
    pipeline.begin(src, dst)
    while not pipeline.step():
        pass
    assert pipeline.tiles == pipeline.tiling.tiles
    pipeline.close()
    out, depth = pipeline.out_format.planes(), pipeline.format.depth
    return [frames.samples(d, p.width, depth).copy() for d, p in zip(dst, out, strict=True)]


def scene(fmt: FrameFormat, seed: int = 0) -> list[Bytes]:
    """Smooth planes away from the ends of the range, so that no colour is cut off."""
    rng = np.random.default_rng(seed)
    top = (1 << fmt.depth) - 1
    src = frames.empty(fmt)
    for role, plane, lies in zip(fmt.roles, src, fmt.planes(), strict=True):
        y, x = np.mgrid[0 : lies.height, 0 : lies.width]
        wave = np.sin(x / 5 + rng.random()) * np.cos(y / 4 + rng.random())
        level = (
            0.5 + (0.15 if role in ("y", "full" if fmt.matrix == "rgb" else "y") else 0.04) * wave
        )
        frames.samples(plane, lies.width, fmt.depth)[:] = np.round(level * top)
    return src


def planes_of(fmt: FrameFormat, src: list[Bytes]) -> list[Array]:
    lies = fmt.planes()
    return [
        frames.samples(s, p.width, fmt.depth).astype(np.float64)
        for s, p in zip(src, lies, strict=True)
    ]


SIZES = [(33, 17), (40, 24), (1, 1)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("depth", [8, 16])
def test_luma_networks_see_luma_and_chroma_is_bicubic(
    backend: Backend, luma: tuple[ConvModel, Net], size: tuple[int, int], depth: int
) -> None:
    model, net = luma
    fmt = FrameFormat(*size, "i420", depth)
    src = scene(fmt)
    got = run(ConvPipeline(backend, model, fmt), src)
    top = (1 << depth) - 1
    y = planes_of(fmt, src)[0]
    want = np.clip(evaluate(net, y[None] / top)[0], 0, 1) * top
    assert np.abs(got[0] - want).max() < (0.6 if depth == 8 else 40)
    for chroma, low in zip(got[1:], planes_of(fmt, src)[1:], strict=True):
        near = low.repeat(2, 0).repeat(2, 1)[: chroma.shape[0], : chroma.shape[1]]
        assert np.abs(chroma - near).max() < 0.03 * top


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("depth", [8, 16])
def test_red_green_and_blue_as_they_are(
    backend: Backend, colour: tuple[ConvModel, Net], size: tuple[int, int], depth: int
) -> None:
    model, net = colour
    fmt = FrameFormat(*size, "i444", depth, "centre", True, "rgb")
    src = scene(fmt)
    got = run(ConvPipeline(backend, model, fmt), src)
    top = (1 << depth) - 1
    want = np.clip(evaluate(net, np.stack(planes_of(fmt, src)) / top), 0, 1) * top
    assert np.abs(np.stack(got) - want).max() < (0.6 if depth == 8 else 40)


@pytest.mark.parametrize("pixel", ["i420", "nv12", "i444", "gray"])
@pytest.mark.parametrize(
    ("siting", "full", "matrix"), [("left", False, "601"), ("centre", True, "709")]
)
def test_colour_networks_on_video(
    backend: Backend,
    colour: tuple[ConvModel, Net],
    pixel: str,
    siting: str,
    full: bool,
    matrix: str,
) -> None:
    """Against the same in numpy, with the way there and back written down once more."""
    model, net = colour
    fmt = FrameFormat(30, 18, pixel, 8, siting, full, matrix)
    src = scene(fmt)
    low = planes_of(fmt, src)
    if pixel == "nv12":
        low = [low[0], low[1][:, ::2], low[1][:, 1::2]]
    got = run(ConvPipeline(backend, model, fmt), src)
    if pixel == "nv12":
        got = [got[0], got[1][:, ::2], got[1][:, 1::2]]
    black, reach, middle = (0, 255, 255) if full else (16, 219, 224)
    y = (low[0] - black) / reach
    half = pixel in ("i420", "nv12")
    kr, kb = MATRICES[matrix]
    kg = 1 - kr - kb
    if pixel == "gray":
        rgb = np.stack([y] * 3)
    else:
        u, v = (((_wide(c, siting) if half else c) - 128) / middle for c in low[1:])
        red, blue = y + 2 * (1 - kr) * v, y + 2 * (1 - kb) * u
        rgb = np.stack([red, (y - kr * red - kb * blue) / kg, blue])
    out = np.clip(evaluate(net, rgb), 0, 1)
    y = kr * out[0] + kg * out[1] + kb * out[2]
    want = [y * reach + black]
    if pixel != "gray":
        for c, k in ((2, kb), (0, kr)):
            plane = (out[c] - y) / (2 * (1 - k)) * middle + 128
            want.append(_narrow(plane, siting) if half else plane)
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() < 0.7


def _wide(c: Array, siting: str) -> Array:
    """Twice the size: between centres, or across from the left."""
    for axis, centred in ((0, True), (1, siting == "centre")):
        at = np.arange(2 * c.shape[axis]) / 2 - (0.25 if centred else 0)
        low = np.floor(at).astype(int)
        share = (at - low).reshape([-1, 1] if axis == 0 else [1, -1])
        a, b = (c.take(np.clip(low + k, 0, c.shape[axis] - 1), axis) for k in (0, 1))
        c = a + share * (b - a)
    return c


def _narrow(c: Array, siting: str) -> Array:
    c = (c[::2] + c[1::2]) / 2
    if siting == "centre":
        return (c[:, ::2] + c[:, 1::2]) / 2
    padded = np.pad(c, ((0, 0), (1, 1)), mode="edge")
    return padded[:, :-2:2] / 4 + padded[:, 1:-1:2] / 2 + padded[:, 2::2] / 4


@pytest.mark.parametrize("pixel", ["i420", "nv12", "i444"])
def test_tiles_with_the_whole_radius_change_nothing(
    backend: Backend, colour: tuple[ConvModel, Net], pixel: str
) -> None:
    model, _ = colour
    fmt = FrameFormat(101, 47, pixel)
    src = scene(fmt)
    whole = run(ConvPipeline(backend, model, fmt), src)
    cut = ConvPipeline(backend, model, fmt, tile=24)
    assert cut.tiling.tiles > 6
    assert cut.overlap >= model.plan.radius
    for a, b in zip(whole, run(cut, src), strict=True):
        assert np.abs(a.astype(int) - b).max() <= 1


def test_no_overlap_shows(backend: Backend, colour: tuple[ConvModel, Net]) -> None:
    model, _ = colour
    fmt = FrameFormat(64, 40, "i444", 16, "centre", True, "rgb")
    src = scene(fmt)
    whole = run(ConvPipeline(backend, model, fmt), src)
    cut = run(ConvPipeline(backend, model, fmt, tile=16, overlap=2), src)
    assert max(np.abs(a.astype(int) - b).max() for a, b in zip(whole, cut, strict=True)) > 20


def test_the_cache_is_used(cpu_backend: Backend, tmp_path: Path) -> None:
    cache = tmp_path / "key.pvrm"
    data = file(3)
    model, _ = load(cpu_backend, data, str(cache))
    assert "uncached" not in model.info
    before = cache.stat().st_mtime_ns
    again, _ = load(cpu_backend, data, str(cache))
    assert cache.stat().st_mtime_ns == before
    assert again.info == model.info
    other, _ = load(cpu_backend, file(3, seed=2), str(cache))
    assert cache.stat().st_mtime_ns != before
    nowhere, _ = load(cpu_backend, data, str(tmp_path / "no" / "key.pvrm"))
    assert "cannot be written" in nowhere.info["uncached"]
    assert (model.scale, model.colours, other.info["arch"]) == (2, 3, "convnet")


@pytest.mark.parametrize("fmt", ["f16", "q8"])
def test_compiled_files(cpu_backend: Backend, tmp_path: Path, fmt: str) -> None:
    path, data = tmp_path / "a.pvrm", file(3)
    fd = fd_of(data)
    net = convnets.load_fd(fd)
    os.close(fd)
    convnet.write(path, net, fmt, {"name": "a", "licence": "CC0"})
    with path.open("rb") as f:
        info = kinds.inspect(f.fileno())
        model = kinds.load(f.fileno(), "", cpu_backend)
    assert isinstance(model, ConvModel)
    assert (info["format"], info["licence"], info["name"]) == (fmt, "CC0", "a")
    form = FrameFormat(24, 16, "i444", 16, "centre", True, "rgb")
    src = scene(form)
    got = np.stack(run(ConvPipeline(cpu_backend, model, form), src)) / 65535
    want = evaluate(net, np.stack(planes_of(form, src)) / 65535)
    assert np.abs(got - np.clip(want, 0, 1)).max() < (0.002 if fmt == "f16" else 0.02)


def test_compiled_files_that_are_damaged(cpu_backend: Backend, tmp_path: Path) -> None:
    path = tmp_path / "a.pvrm"
    fd = fd_of(file(3))
    net = convnets.load_fd(fd)
    os.close(fd)
    convnet.write(path, net, "f16", {"name": "a"})
    held = Pvrm.open(path)
    wrong: list[dict[str, Any]] = [
        {"format": "q8"}, {"format": "q5"}, {"network": {}}, {"compiler": 0},
    ]  # fmt: skip
    for change in wrong:
        held.metadata = {**Pvrm.open(path).metadata, **change}
        with pytest.raises((BadModel, UnsupportedModel)):
            ConvModel(held, cpu_backend)
    path.write_bytes(path.read_bytes()[:-5000])
    with path.open("rb") as f, pytest.raises(PvrError):
        kinds.load(f.fileno(), "", cpu_backend)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA"])
def test_pictures(cpu_backend: Backend, mode: str) -> None:
    model, net = load(cpu_backend, file(3))
    rng = np.random.default_rng(5)
    bands = len(Image.new(mode, (1, 1)).getbands())
    small = rng.integers(60, 190, (5, 7, bands), np.uint8)
    picture = Image.fromarray(small.squeeze(), mode).resize((26, 19), Image.Resampling.BICUBIC)
    data = io.BytesIO()
    picture.save(data, "PNG")
    job = PictureJob(cpu_backend, [model], data.getvalue(), {"scale": 2})
    while not job.step():
        pass
    got = np.asarray(Image.open(io.BytesIO(job.encoded())).convert(mode), np.float64)
    pixels = np.asarray(picture, np.float64).reshape(19, 26, bands)
    colours = pixels[:, :, :3] if bands >= 3 else pixels[:, :, :1].repeat(3, 2)
    want = evaluate(net, colours.transpose(2, 0, 1) / 255)
    want = np.clip(want, 0, 1).transpose(1, 2, 0) * 255
    if bands < 3:
        want = want @ [[0.299], [0.587], [0.114]]
    got = got.reshape(38, 52, bands)
    assert np.abs(got[:, :, : want.shape[2]] - want).max() < 0.7
    if bands in (2, 4):
        near = pixels[:, :, -1].repeat(2, 0).repeat(2, 1)
        assert np.abs(got[:, :, -1] - near).max() < 30
    model.close()


def test_frames_that_are_given_up(cpu_backend: Backend) -> None:
    model, _ = load(cpu_backend, file(3))
    fmt = FrameFormat(64, 64)
    src = scene(fmt)
    pipeline = ConvPipeline(cpu_backend, model, fmt, tile=32)
    dst = frames.empty(pipeline.out_format)
    pipeline.begin(src, dst)
    while pipeline.tiles < 3:
        pipeline.step()
    assert pipeline.rows_done == 64
    pipeline.abandon()
    assert pipeline.tiles_fallback == 2
    assert pipeline.step()
    pipeline.begin(src, dst)
    assert (pipeline.tiles, pipeline.rows_done) == (0, 0)
    pipeline.close()
    model.close()


def test_short_slices_take_part_by_part(
    cpu_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load(cpu_backend, file(3))
    fmt = FrameFormat(64, 64)
    src = scene(fmt)
    whole = run(ConvPipeline(cpu_backend, model, fmt), src)
    monkeypatch.setattr(LIMIT, "slice_s", 1e-9)
    pipeline = ConvPipeline(cpu_backend, model, fmt)
    dst = frames.empty(pipeline.out_format)
    pipeline.begin(src, dst)
    steps = 1
    while not pipeline.step():
        steps += 1
    assert steps == pipeline.slices
    pipeline.close()
    again = run(ConvPipeline(cpu_backend, model, fmt), src)
    assert all(np.array_equal(a, b) for a, b in zip(whole, again, strict=True))
    model.close()


@pytest.mark.gpu
@pytest.mark.parametrize("pixel", ["i420", "nv12", "i444a"])
def test_every_call_passes_its_check(gpu_backend: Backend, pixel: str) -> None:
    checked = CheckedBackend(gpu_backend, 1.0, np.random.default_rng(2))  # type: ignore[arg-type]
    for channels in (3, 1):
        model, _ = load(checked, file(channels))
        fmt = FrameFormat(45, 30, pixel)
        run(ConvPipeline(checked, model, fmt, tile=24), scene(fmt))
        model.close()
    assert checked.counters()["checks_failed"] == 0
    ops = {op for op, _, _ in checked.seen}
    assert ops >= {"conv2d", "resize", "pixel_shuffle", "maps_in", "maps_out", "plane_scale"}
