# SPDX-License-Identifier: Apache-2.0
"""Any size: models one after the other, and filters for the rest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from engine.backends.base import Backend
from engine.backends.null import NullBackend
from engine.errors import InvalidArgument
from engine.video import frames
from engine.video.chain import Enlarger, choose, size_of
from engine.video.frames import Bytes, FrameFormat
from engine.video.network import VideoModel
from engine.video.resample import Resampler
from tests.engine.video.conftest import FAST, enlarge, noise, synthetic

Family = list[VideoModel]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory, cpu_backend: Backend) -> Iterator[Family]:
    """Small models of x2, x3 and x4."""
    folder = tmp_path_factory.mktemp("models")
    found = [
        VideoModel.load(str(synthetic(folder / f"x{scale}.pvrm", scale)), cpu_backend)
        for scale in (2, 3, 4)
    ]
    yield found
    for model in found:
        model.close()


def run(
    backend: Backend, models: Family, fmt: FrameFormat, out: FrameFormat, src: list[Bytes]
) -> tuple[Enlarger, list[npt.NDArray[np.int64]]]:
    enlarger = Enlarger(backend, choose(models, fmt, out), fmt, out, tile=32)
    dst = frames.empty(out)
    enlarger.begin(src, dst)
    slices = 1
    while not enlarger.step():
        slices += 1
    assert slices == enlarger.slices
    return enlarger, samples(dst, out)


def samples(planes: list[Bytes], fmt: FrameFormat) -> list[npt.NDArray[np.int64]]:
    return [
        frames.samples(d, p.width, fmt.depth).astype(int)
        for d, p in zip(planes, fmt.planes(), strict=True)
    ]


def gradient(fmt: FrameFormat) -> list[Bytes]:
    """Planes that rise evenly in both directions, each on the grid of its siting."""
    planes = frames.empty(fmt)
    for i, role in enumerate(fmt.roles):
        across, down = fmt.pixels(role)
        step = 2 if role == "pairs" else 1
        for part in range(step):
            y, x = np.mgrid[0:down, 0:across].astype(float)
            if role in ("half", "pairs"):
                x = 2 * x + (0 if fmt.siting == "left" else 0.5)
                y = 2 * y + 0.5
            level = 40 + 100 * (x + 0.5) / fmt.width + 60 * (y + 0.5) / fmt.height
            view = frames.samples(planes[i], across * step, fmt.depth)
            view[:, part::step] = np.round(level * (1 if fmt.depth == 8 else 257))
    return planes


@pytest.mark.parametrize(
    ("ratio", "scales"),
    [
        (1, [2]), (2, [2]), (2.5, [3]), (3, [3]), (3.2, [4]), (4, [4]), (4.5, [2, 3]), (6, [2, 3]),
        (7, [2, 4]), (8, [2, 4]),
    ],
)  # fmt: skip
def test_chains(family: Family, ratio: float, scales: list[int]) -> None:
    fmt = FrameFormat(100, 100)
    out = fmt.sized(round(100 * ratio), round(50 * ratio))
    assert [m.scale for m in choose(family, fmt, out)] == scales
    two = [m.scale for m in choose(family[:1], fmt, out)]
    assert len(two) == max(1, int(np.ceil(np.log2(ratio))))


def test_sizes(family: Family) -> None:
    fmt = FrameFormat(15, 9)
    assert size_of(fmt, 2.5) == (38, 23)
    assert size_of(fmt, 2, 40, 9) == (40, 9)
    for wrong in ((2, 40, 0), (2, 14, 9), (8.2, 0, 0), (2, 15, 73)):
        with pytest.raises(InvalidArgument):
            size_of(fmt, *wrong)


@pytest.mark.parametrize("pixel", ["i420", "nv12", "gray"])
def test_models_one_after_the_other(cpu_backend: Backend, family: Family, pixel: str) -> None:
    fmt = FrameFormat(21, 14, pixel)
    src = noise(fmt)
    enlarger, got = run(cpu_backend, family, fmt, fmt.scaled(6), src)
    step = enlarge(cpu_backend, family[0], fmt, src)
    between = frames.empty(fmt.scaled(2))
    for plane, part in zip(between, step, strict=True):
        plane[:, : part.shape[1]] = part
    want = enlarge(cpu_backend, family[1], fmt.scaled(2), between)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert enlarger.tiles == enlarger.frame_tiles
    assert enlarger.tiles_fallback == 0


@pytest.mark.parametrize("size", [(38, 23), (62, 31), (55, 26), (120, 100), (15, 9)])
@pytest.mark.parametrize("siting", ["left", "centre"])
@pytest.mark.parametrize(("pixel", "depth"), [("i420", 8), ("nv12", 16), ("i444", 8)])
def test_any_size_keeps_everything_in_its_place(
    cpu_backend: Backend,
    model: VideoModel,
    size: tuple[int, int],
    siting: str,
    pixel: str,
    depth: int,
) -> None:
    fmt = FrameFormat(15, 13 if size[1] > 13 else 9, pixel, depth, siting)
    out = fmt.sized(*size)
    _, got = run(cpu_backend, [model], fmt, out, gradient(fmt))
    want = samples(gradient(out), out)
    for a, b in zip(got, want, strict=True):
        # The border repeats, so a gradient is flat there.
        inner = np.s_[a.shape[0] // 3 : -a.shape[0] // 3, a.shape[1] // 3 : -a.shape[1] // 3]
        # A quarter of a luma sample's shift would be 1.7 levels across.
        assert abs((a - b)[inner].mean()) < (0.8 if depth == 8 else 0.8 * 257)


@pytest.mark.parametrize("kernel", ["lanczos", "cubic"])
@pytest.mark.parametrize("pixel", ["i420", "nv12"])
@pytest.mark.parametrize(
    ("size", "out"), [((1, 1), (3, 2)), ((7, 5), (7, 5)), ((40, 700), (9, 301))]
)
def test_resampler_keeps_what_is_flat(
    cpu_backend: Backend, kernel: str, pixel: str, size: tuple[int, int], out: tuple[int, int]
) -> None:
    fmt = FrameFormat(*size, pixel)
    src = frames.empty(fmt)
    for plane in src:
        plane[:] = 77
    resampler = Resampler(cpu_backend, fmt, fmt.sized(*out), kernel)
    dst = frames.empty(resampler.out_format)
    resampler.begin(src, dst)
    while not resampler.step():
        pass
    assert all((p == 77).all() for p in samples(dst, resampler.out_format))
    resampler.close()


@pytest.mark.gpu
def test_gpu_within_one_step_of_the_cpu(cpu_backend: Backend, gpu_backend: Backend) -> None:
    fmt = FrameFormat(37, 21, "nv12")
    src, out = noise(fmt), fmt.sized(90, 50)
    ours, theirs = (
        run(b, [VideoModel.load(str(FAST), b)], fmt, out, src)[1]
        for b in (cpu_backend, gpu_backend)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert np.abs(a - b).max() <= 1


@pytest.mark.parametrize("scale", [2, 6, 2.5])
def test_the_rest_of_a_frame_is_interpolated(
    cpu_backend: Backend, family: Family, scale: float
) -> None:
    fmt = FrameFormat(40, 70)
    out = fmt.sized(int(scale * 40), int(scale * 70))
    src = noise(fmt)
    enlarger = Enlarger(cpu_backend, choose(family, fmt, out), fmt, out, tile=32)
    dst = frames.empty(out)
    enlarger.begin(src, dst)
    enlarger.step()
    enlarger.finish_plainly()
    assert enlarger.step()
    quick = Resampler(cpu_backend, fmt, out, "cubic")
    plainly = frames.empty(out)
    quick.begin(src, plainly)
    while not quick.step():
        pass
    for got, want in zip(samples(dst, out), samples(plainly, out), strict=True):
        np.testing.assert_array_equal(got, want)
    assert enlarger.tiles_fallback == enlarger.tiles == enlarger.frame_tiles


def test_bands_that_are_done_stay(cpu_backend: Backend, family: Family) -> None:
    fmt = FrameFormat(32, 96)
    out, src = fmt.scaled(2), noise(fmt)
    whole = run(cpu_backend, family, fmt, out, src)[1]
    enlarger = Enlarger(cpu_backend, family[:1], fmt, out, tile=32)
    dst = frames.empty(out)
    enlarger.begin(src, dst)
    enlarger.step()
    enlarger.finish_plainly()
    assert (enlarger.tiles, enlarger.tiles_fallback) == (3, 2)
    for i, (got, want) in enumerate(zip(samples(dst, out), whole, strict=True)):
        rows = 32 if i else 64
        np.testing.assert_array_equal(got[:rows], want[:rows])
        assert i or (got[rows:] != want[rows:]).any()


def test_what_makes_no_sense_is_refused(cpu_backend: Backend, model: VideoModel) -> None:
    fmt = FrameFormat(8, 8)
    for models, out in (([model], fmt.sized(7, 16)), ([model], fmt.sized(65, 16)), ([], fmt)):
        with pytest.raises(InvalidArgument):
            Enlarger(cpu_backend, models, fmt, out)


def test_a_band_has_to_fit_the_device() -> None:
    fmt = FrameFormat(16384, 16384, "gray", 16)
    with pytest.raises(InvalidArgument, match="bindings"):
        Resampler(NullBackend(), fmt, FrameFormat(1, 1, "gray", 16))
