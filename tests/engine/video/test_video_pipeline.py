# SPDX-License-Identifier: Apache-2.0
"""Whole frames: seams, odd sizes, formats, devices, and what happens when a device returns
rubbish.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.backends import cpu
from engine.backends.base import Backend
from engine.backends.host import aligned
from engine.backends.null import NullBackend
from engine.errors import DeviceLost, InvalidArgument
from engine.pvrm import Pvrm
from engine.video import frames, plain, spare
from engine.video.frames import Bytes, FrameFormat
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline
from tests.engine.video.conftest import FAST, enlarge, noise, psnr, scene

F64 = npt.NDArray[np.float64]
SIZES = [(1, 1), (7, 5), (64, 2), (33, 47), (130, 70)]


def filtered(plane: F64, filters: F64) -> F64:
    """[h, w] by [n, 5, 5] to [n, h, w], the border repeated."""
    wide = np.pad(plane, 2, mode="edge")
    h, w = plane.shape
    out = np.zeros((len(filters), h, w))
    for t in range(25):
        out += filters[:, t // 5, t % 5, None, None] * wide[t // 5 : t // 5 + h, t % 5 : t % 5 + w]
    return out


def shuffled(phases: F64) -> F64:
    """[s * s, h, w] to [s h, s w]."""
    scale = int(len(phases) ** 0.5)
    h, w = phases.shape[1:]
    return phases.reshape(scale, scale, h, w).transpose(2, 0, 3, 1).reshape(scale * h, scale * w)


def network(file: Pvrm, inputs: F64, prefix: str = "") -> F64:
    """A network of the file on whole planes [n, h, w] of samples 0..255, in float64; shares nothing
    with kernels/.
    """
    meta = file.metadata["chroma"] if prefix else file.metadata
    skips = {b: a for a, b in meta.get("skips", [])}
    count = meta["blocks"] + 2
    x = np.pad(inputs / 255, ((0, 0), (count, count), (count, count)), mode="edge")
    given: list[Any] = []
    for i in range(count):
        flat = file.blob(f"{prefix}conv{i}").view("<f4").astype(np.float64)
        cin = x.shape[0]
        cout = len(flat) // (9 * cin + 2)
        w = flat[: cin * 9 * cout].reshape(cin, 3, 3, cout)
        bias, slope = flat[cin * 9 * cout :].reshape(2, cout, 1, 1)
        h, wd = x.shape[1] - 2, x.shape[2] - 2
        y = np.zeros((cout, h, wd)) + bias
        for a in range(3):
            for b in range(3):
                y += np.tensordot(w[:, a, b], x[:, a : a + h, b : b + wd], ((0,), (0,)))
        if i in skips:
            ring = i - skips[i]
            y += given[skips[i]][:, ring:-ring, ring:-ring]
            slope = file.blob(f"skip{i}").view("<f4").astype(np.float64)[:, None, None]
        x = np.where(y > 0, y, slope * y)
        given.append(x)
    base = file.blob(f"{prefix}base").view("<f4").astype(np.float64).reshape(-1, 5, 5)
    return np.clip(shuffled(x[: len(base)] + filtered(inputs[0] / 255, base)) * 255, 0, 255)


def with_luma(luma: F64, chroma: F64) -> F64:
    """The five inputs of a chroma network: chroma, and luma at the four places of each sample."""
    h, w = chroma.shape
    wide = np.pad(luma, ((0, 2 * h - luma.shape[0]), (0, 2 * w - luma.shape[1])), mode="edge")
    return np.stack([chroma, *(wide[a::2, b::2] for a in (0, 1) for b in (0, 1))])


def learned(plane: F64, name: str) -> F64:
    """A learned chroma filter of the fast model on a whole plane."""
    filters = Pvrm.open(str(FAST)).blob(name).view("<f4").astype(np.float64).reshape(-1, 5, 5)
    return np.clip(shuffled(filtered(plane, filters)), 0, 255)


def planes_of(fmt: FrameFormat, src: list[Bytes]) -> list[F64]:
    """What the planes of a frame of 8 bits hold."""
    return [s[:, : p.width].astype(np.float64) for s, p in zip(src, fmt.planes(), strict=True)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("siting", ["left", "centre"])
def test_frame_is_what_the_network_says(
    cpu_backend: Backend, model: VideoModel, size: tuple[int, int], siting: str
) -> None:
    fmt = FrameFormat(*size, "i420", 8, siting)
    src = noise(fmt)
    got = enlarge(cpu_backend, model, fmt, src)
    planes = planes_of(fmt, src)
    file = Pvrm.open(str(FAST))
    assert np.abs(got[0] - network(file, planes[0][None])).max() < 0.51
    for plane, out in zip(planes[1:], got[1:], strict=True):
        want = network(file, with_luma(planes[0], plane), f"chroma.{siting}.")
        assert np.abs(out - want[: out.shape[0], : out.shape[1]]).max() < 0.51


@pytest.mark.parametrize("precision", ["f32", "int8"])
def test_how_many_threads_there_are_changes_no_sample(precision: str) -> None:
    fmt = FrameFormat(641, 61)
    src, found = noise(fmt), []
    for threads in (1, 2, 3, 5):
        backend = cpu.CpuBackend(threads)
        model = VideoModel(Pvrm.open(str(FAST)), backend, precision)
        found.append(enlarge(backend, model, fmt, src))
        model.close()
    for planes in found[1:]:
        for a, b in zip(found[0], planes, strict=True):
            np.testing.assert_array_equal(a, b)


def test_full_size_chroma_takes_the_centre_filter(cpu_backend: Backend, model: VideoModel) -> None:
    fmt = FrameFormat(19, 9, "i444", 8, "left")
    src = noise(fmt)
    got = enlarge(cpu_backend, model, fmt, src)
    want = learned(src[2][:, :19].astype(np.float64), "chroma.centre")
    assert np.abs(got[2] - want).max() < 0.51


@pytest.mark.parametrize("size", [*SIZES, (4097, 3), (3, 1031)])
@pytest.mark.parametrize("pixel", ["i420", "i444"])
def test_tiled_is_equal_to_untiled(
    cpu_backend: Backend, model: VideoModel, size: tuple[int, int], pixel: str
) -> None:
    fmt = FrameFormat(*size, pixel)
    src = noise(fmt)
    whole = enlarge(cpu_backend, model, fmt, src, tile=8192)
    for tile in (0, 16, 36):
        for a, b in zip(enlarge(cpu_backend, model, fmt, src, tile), whole, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("size", [(7, 5), (150, 70)])
def test_wide_layers_are_equal_in_any_tile(cpu_backend: Backend, size: tuple[int, int]) -> None:
    fmt = FrameFormat(*size, "gray", 16)
    src = noise(fmt)
    model = VideoModel.load(str(FAST.with_name("nsr-quality.pvrm")), cpu_backend)
    assert model.networks.spread(cpu_backend.info) > 0
    whole = enlarge(cpu_backend, model, fmt, src, tile=8192)
    for tile in (0, 8, 36):
        np.testing.assert_array_equal(enlarge(cpu_backend, model, fmt, src, tile)[0], whole[0])
    model.close()


@pytest.mark.gpu
@pytest.mark.parametrize("pixel", ["i420", "nv12", "i444", "gray"])
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("size", [(1, 1), (33, 47)])
def test_gpu_within_one_step_of_the_cpu(
    cpu_backend: Backend,
    gpu_backend: Backend,
    model: VideoModel,
    gpu_model: VideoModel,
    pixel: str,
    depth: int,
    size: tuple[int, int],
) -> None:
    fmt = FrameFormat(*size, pixel, depth)
    src = noise(fmt)
    ours = enlarge(cpu_backend, model, fmt, src)
    theirs = enlarge(gpu_backend, gpu_model, fmt, src, tile=16)
    for a, b in zip(ours, theirs, strict=True):
        assert np.abs(a.astype(int) - b.astype(int)).max() <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(7, 5), (130, 70)])
def test_tiled_is_equal_to_untiled_on_the_gpu(
    gpu_backend: Backend, gpu_model: VideoModel, size: tuple[int, int]
) -> None:
    fmt = FrameFormat(*size)
    src = noise(fmt)
    whole = enlarge(gpu_backend, gpu_model, fmt, src, tile=2048)
    for a, b in zip(enlarge(gpu_backend, gpu_model, fmt, src, tile=20), whole, strict=True):
        np.testing.assert_array_equal(a, b)


def test_references_agree_with_the_kernels(cpu_backend: Backend, model: VideoModel) -> None:
    fmt = FrameFormat(21, 10, "nv12")
    src = noise(fmt)
    backend = NullBackend(reference=True)
    other = VideoModel.load(str(FAST), backend)
    for a, b in zip(
        enlarge(cpu_backend, model, fmt, src, 8), enlarge(backend, other, fmt, src), strict=True
    ):
        assert np.abs(a.astype(int) - b.astype(int)).max() <= 1


@pytest.mark.parametrize("siting", ["left", "centre"])
@pytest.mark.parametrize("size", [(33, 47), (64, 8)])
def test_nv12_is_i420_by_turns(
    cpu_backend: Backend, model: VideoModel, size: tuple[int, int], siting: str
) -> None:
    planar = FrameFormat(*size, "i420", 8, siting)
    paired = FrameFormat(*size, "nv12", 8, siting)
    y, u, v = noise(planar)
    uv = frames.empty(paired)[1]
    n = planar.planes()[1].width
    uv[:, 0 : 2 * n : 2], uv[:, 1 : 2 * n : 2] = u[:, :n], v[:, :n]
    want = enlarge(cpu_backend, model, planar, [y, u, v])
    got = enlarge(cpu_backend, model, paired, [y, uv])
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1][:, 0::2], want[1])
    np.testing.assert_array_equal(got[1][:, 1::2], want[2])


def test_16_bits_are_8_bits_with_more_behind(cpu_backend: Backend, model: VideoModel) -> None:
    shallow, deep = FrameFormat(50, 30, "i420", 8), FrameFormat(50, 30, "i420", 16)
    src = noise(shallow)
    wide = frames.empty(deep)
    for s, d, p in zip(src, wide, shallow.planes(), strict=True):
        frames.samples(d, p.width, 16)[:] = s[:, : p.width].astype(np.uint16) * 257
    eight = enlarge(cpu_backend, model, shallow, src)
    sixteen = enlarge(cpu_backend, model, deep, wide)
    for a, b in zip(eight, sixteen, strict=True):
        assert np.abs(a - b / 257).max() < 0.51


def test_better_than_bicubic(cpu_backend: Backend, model: VideoModel) -> None:
    high = np.round(scene(192, 256))
    # Half size by a cubic kernel of eight samples, as MATLAB does it.
    taps = np.array([plain._cubic((t - 3.5) / 2) for t in range(8)])
    taps /= taps.sum()
    wide = np.pad(high, 3, mode="symmetric")
    rows = sum(k * wide[t : t + 191 : 2] for t, k in enumerate(taps))
    small = np.clip(np.round(sum(k * rows[:, t : t + 255 : 2] for t, k in enumerate(taps))), 0, 255)
    assert small.shape == (96, 128)
    fmt = FrameFormat(128, 96, "gray")
    src = frames.empty(fmt)
    src[0][:, :128] = small
    ours = psnr(enlarge(cpu_backend, model, fmt, src)[0].astype(np.float64), high)
    bicubic = plain.enlarge(src[0][:, :128], 0, 0, 96, 128, 8).astype(np.float64)
    assert ours > psnr(bicubic, high) + 2


@pytest.mark.parametrize("pixel", ["i420", "nv12"])
@pytest.mark.parametrize("budget", [10.0, 0.0])
def test_rubbish_is_replaced_and_counted(
    cpu_backend: Backend,
    model: VideoModel,
    pixel: str,
    budget: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the CPU, or, where there is no time for it, by plain interpolation."""
    monkeypatch.setattr(spare, "BUDGET_S", budget)
    backend = NullBackend()  # every frame comes back black
    lost = VideoModel.load(str(FAST), backend)
    fmt = FrameFormat(70, 50, pixel)
    src = noise(fmt)
    src[0][:, :70] = np.round(scene(50, 70))
    src[0][:, :40] = 2  # tiles that are black in truth
    pipeline = VideoPipeline(backend, lost, fmt, tile=40)
    dst = frames.empty(fmt.scaled(2))
    pipeline.begin(src, dst)
    while not pipeline.step():
        pass
    assert pipeline.tiles == pipeline.tiling.tiles == 4
    counts = (pipeline.tiles_cpu, pipeline.tiles_fallback)
    assert counts == ((2, 0) if budget else (0, 2))
    step = 2 if pixel == "nv12" else 1
    want = enlarge(cpu_backend, model, fmt, src)
    if not budget:
        want[0] = plain.enlarge(src[0][:, :70], 0, 0, 50, 70, 8)
        for part in range(step):
            chroma = src[1][:, part : 35 * step : step]
            done = plain.enlarge(chroma, 0, 0, 25, 35, 8, siting="left")
            want[1][:, part::step] = done
    np.testing.assert_array_equal(dst[0][:, 80:140], want[0][:, 80:140])
    np.testing.assert_array_equal(
        dst[1][:, 40 * step : 70 * step], want[1][:, 40 * step : 70 * step]
    )


@pytest.mark.parametrize("seed", range(4))
def test_scrambled_tiles_are_seen(seed: int) -> None:
    low = np.round(scene(64, 64, seed)).astype(np.uint8)
    good = plain.enlarge(low, 0, 0, 64, 64, 8)
    starts = np.array([0, 32])
    assert plain.implausible(low, good, starts, 8) == []
    rng = np.random.default_rng(seed)
    for bad in (
        rng.permutation(good[:, 64:].ravel()).reshape(128, 64),
        255 - good[:, 64:],
        np.full((128, 64), 255, np.uint8),
        np.zeros((128, 64), np.uint8),
    ):
        wrong = good.copy()
        wrong[:, 64:] = bad
        assert plain.implausible(low, wrong, starts, 8) == [1]
        deep = [a.astype(np.uint16) * 257 for a in (low, wrong)]
        assert plain.implausible(deep[0], deep[1], starts, 16) == [1]


def test_ring_slot_in_and_out(cpu_backend: Backend, model: VideoModel) -> None:
    fmt = FrameFormat(20, 10)
    wide = fmt.scaled(2)
    memory = bytearray(3 * 16384)
    src = frames.views(memory, fmt.planes(), 16384)
    dst = frames.views(memory, wide.planes(4096), 16384)
    for view, plane in zip(src, noise(fmt), strict=True):
        view[:] = plane
    before = bytes(memory)
    pipeline = VideoPipeline(cpu_backend, model, fmt)
    pipeline.begin(src, dst)
    while not pipeline.step():
        pass
    assert memory[: 16384 + 4096] == before[: 16384 + 4096]
    want = enlarge(cpu_backend, model, fmt, [s.copy() for s in src])
    for view, w in zip(dst, want, strict=True):
        np.testing.assert_array_equal(view[:, : w.shape[1]], w)
        assert (view[:, w.shape[1] :] == 0).all()
    pipeline.close()


def test_a_new_frame_gives_up_the_old_one(cpu_backend: Backend, model: VideoModel) -> None:
    fmt = FrameFormat(40, 40, "gray")
    pipeline = VideoPipeline(cpu_backend, model, fmt, tile=16)
    old, new = noise(fmt, 1), noise(fmt, 2)
    dst = frames.empty(fmt.scaled(2))
    pipeline.begin(old, dst)
    assert not pipeline.step()
    pipeline.begin(new, dst)
    while not pipeline.step():
        pass
    assert pipeline.step()
    assert pipeline.tiles == pipeline.tiling.tiles
    np.testing.assert_array_equal(dst[0][:, :80], enlarge(cpu_backend, model, fmt, new)[0])
    pipeline.close()


def test_what_makes_no_sense_is_refused(cpu_backend: Backend, model: VideoModel) -> None:
    fmt = FrameFormat(8, 8)
    for extra in ({"unchanged": "no"}, {"tile": -1}, {"overlap": -1}):
        with pytest.raises(InvalidArgument):
            VideoPipeline(cpu_backend, model, fmt, **extra)
    pipeline = VideoPipeline(cpu_backend, model, fmt)
    with pytest.raises(InvalidArgument):
        pipeline.begin(frames.empty(fmt)[:2], frames.empty(fmt.scaled(2)))
    with pytest.raises(InvalidArgument):
        pipeline.begin(frames.empty(fmt), frames.empty(fmt))
    pipeline.close()


def test_device_loss_reaches_the_caller() -> None:
    backend = NullBackend(lose_at=2)
    fmt = FrameFormat(64, 64)
    pipeline = VideoPipeline(backend, VideoModel.load(str(FAST), backend), fmt, tile=32)
    pipeline.begin(noise(fmt), frames.empty(fmt.scaled(2)))
    assert not pipeline.step()
    with pytest.raises(DeviceLost):
        pipeline.step()


def test_a_cpu_writes_results_where_they_go(cpu_backend: Backend, model: VideoModel) -> None:
    # Bands of several slices, and rows that are no whole lines, are copied.
    fmt = FrameFormat(70, 50)
    out = fmt.scaled(model.scale)
    src, found = noise(fmt), []
    ends = [p.offset + p.nbytes for p in out.planes()]
    for tile, shift, straight in ((0, 0, True), (0, 4, False), (32, 0, False)):
        memory = aligned(ends[-1] + 64)[shift:]
        target = frames.views(memory, out.planes(), 0)
        pipeline = VideoPipeline(cpu_backend, model, fmt, tile=tile)
        for _ in range(2):
            before = cpu_backend.counters()
            pipeline.begin(src, target)
            while not pipeline.step():
                pass
            after = cpu_backend.counters()
            assert (after["bytes_direct"] - before["bytes_direct"] == ends[-1]) == straight
        found.append([p.copy() for p in target])
        pipeline.close()
    for planes in found[1:]:
        for a, b, p in zip(planes, found[0], out.planes(), strict=True):
            np.testing.assert_array_equal(a[:, : p.width], b[:, : p.width])
