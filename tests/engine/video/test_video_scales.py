# SPDX-License-Identifier: Apache-2.0
"""Networks of every kind - each scale, skips, chroma that sees luma - against a plain float64 form
of them, at awkward sizes, in tiles, on each device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.backends.base import Backend
from engine.backends.null import NullBackend
from engine.pvrm import Pvrm
from engine.video import frames
from engine.video.frames import FrameFormat
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline
from tests.engine.video.conftest import enlarge, noise, synthetic
from tests.engine.video.test_video_pipeline import network, planes_of, with_luma

SIZES = [(1, 1), (7, 5), (33, 22), (4097, 3)]
SKIPS = [(0, 2), (2, 4), (0, 5)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A small model of each scale, that of x3 with skips; all see luma for their chroma."""
    folder = tmp_path_factory.mktemp("models")
    return {
        scale: synthetic(
            folder / f"x{scale}.pvrm",
            scale,
            blocks=5 if scale == 3 else 1,
            skips=SKIPS if scale == 3 else None,
            chroma={"channels": 8, "blocks": scale - 2},
        )
        for scale in (2, 3, 4)
    }


@pytest.fixture(scope="module")
def models(files: dict[int, Path], cpu_backend: Backend) -> Iterator[dict[int, VideoModel]]:
    found = {scale: VideoModel.load(str(path), cpu_backend) for scale, path in files.items()}
    yield found
    for model in found.values():
        model.close()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("siting", ["left", "centre"])
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_frame_is_what_the_networks_say(
    cpu_backend: Backend,
    models: dict[int, VideoModel],
    files: dict[int, Path],
    scale: int,
    siting: str,
    size: tuple[int, int],
) -> None:
    fmt = FrameFormat(*size, "i420", 8, siting)
    src = noise(fmt)
    file, planes = Pvrm.open(str(files[scale])), planes_of(fmt, src)
    got = enlarge(cpu_backend, models[scale], fmt, src, tile=16)
    assert np.abs(got[0] - network(file, planes[0][None])).max() < 0.51
    for plane, out in zip(planes[1:], got[1:], strict=True):
        want = network(file, with_luma(planes[0], plane), f"chroma.{siting}.")
        assert np.abs(out - want[: out.shape[0], : out.shape[1]]).max() < 0.51


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize(
    ("depth", "size"), [(8, (1, 1)), (16, (7, 5)), (16, (33, 22)), (8, (4097, 3))]
)
def test_cuts_and_pairs_change_nothing(
    cpu_backend: Backend,
    models: dict[int, VideoModel],
    scale: int,
    size: tuple[int, int],
    depth: int,
) -> None:
    planar, paired = FrameFormat(*size, "i420", depth), FrameFormat(*size, "nv12", depth)
    src = noise(planar)
    whole = enlarge(cpu_backend, models[scale], planar, src, tile=8192)
    for a, b in zip(enlarge(cpu_backend, models[scale], planar, src, 8), whole, strict=True):
        np.testing.assert_array_equal(a, b)
    dtype = np.uint8 if depth == 8 else np.uint16
    pairs = noise(paired)[1].view(dtype)
    n = planar.planes()[1].width
    pairs[:, 0 : 2 * n : 2], pairs[:, 1 : 2 * n : 2] = (s.view(dtype)[:, :n] for s in src[1:])
    got = enlarge(cpu_backend, models[scale], paired, [src[0], pairs.view(np.uint8)], 16)
    for a, b in zip((got[0], got[1][:, 0::2], got[1][:, 1::2]), whole, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("overlap", [1, 6, 16, 300])
def test_every_overlap_gives_the_same(
    cpu_backend: Backend, models: dict[int, VideoModel], overlap: int
) -> None:
    fmt = FrameFormat(37, 23)
    src, model = noise(fmt), models[2]
    pipeline = VideoPipeline(cpu_backend, model, fmt, 16, overlap)
    dst = frames.empty(pipeline.out_format)
    pipeline.begin(src, dst)
    while not pipeline.step():
        pass
    for plane, want in zip(dst, enlarge(cpu_backend, model, fmt, src), strict=True):
        np.testing.assert_array_equal(plane[:, : want.shape[1]], want)
    pipeline.close()


@pytest.mark.parametrize("pixel", ["i444", "gray", "graya"])
def test_formats_without_half_size_chroma_take_filters(
    cpu_backend: Backend, models: dict[int, VideoModel], files: dict[int, Path], pixel: str
) -> None:
    fmt = FrameFormat(19, 9, pixel)
    src = noise(fmt)
    for scale, model in models.items():
        got = enlarge(cpu_backend, model, fmt, src)
        file, planes = Pvrm.open(str(files[scale])), planes_of(fmt, src)
        assert np.abs(got[0] - network(file, planes[0][None])).max() < 0.51
        assert [g.shape for g in got] == [(9 * scale, 19 * scale)] * len(planes)


def test_references_agree_with_the_kernels(
    cpu_backend: Backend, models: dict[int, VideoModel], files: dict[int, Path]
) -> None:
    fmt = FrameFormat(21, 10, "nv12")
    src = noise(fmt)
    backend = NullBackend(reference=True)
    for scale, path in files.items():
        ours = enlarge(cpu_backend, models[scale], fmt, src, 8)
        theirs = enlarge(backend, VideoModel.load(str(path), backend), fmt, src)
        for a, b in zip(ours, theirs, strict=True):
            assert np.abs(a.astype(int) - b.astype(int)).max() <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize(
    ("pixel", "depth", "size"), [("i420", 8, (33, 21)), ("nv12", 16, (7, 5)), ("i444", 8, (1, 1))]
)
def test_gpu_within_one_step_of_the_cpu(
    cpu_backend: Backend,
    gpu_backend: Backend,
    models: dict[int, VideoModel],
    files: dict[int, Path],
    scale: int,
    pixel: str,
    depth: int,
    size: tuple[int, int],
) -> None:
    fmt = FrameFormat(*size, pixel, depth)
    src = noise(fmt)
    model = VideoModel.load(str(files[scale]), gpu_backend)
    ours = enlarge(cpu_backend, models[scale], fmt, src)
    for tile in (0, 16):
        theirs = enlarge(gpu_backend, model, fmt, src, tile)
        for a, b in zip(ours, theirs, strict=True):
            assert np.abs(a.astype(int) - b.astype(int)).max() <= 1
    model.close()
