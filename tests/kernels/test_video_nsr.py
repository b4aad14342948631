# SPDX-License-Identifier: Apache-2.0
"""A whole network in one call: every variant against the numpy reference, and cut anywhere."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kernels
from engine.backends.cpu import CpuBackend
from engine.video import calibrate
from kernels import video
from kernels.nsr import op as nsr
from kernels.nsr_int8 import op as nsr_int8
from tests.kernels.harness import Runner, reference

Array = npt.NDArray[Any]


def network(channels: int, layers: int, scale: int) -> tuple[list[nsr.Layer], Array]:
    """A network whose values stay near 1 and whose maps are small, as those of trained ones."""
    rng = np.random.default_rng(channels + layers + scale)
    sizes = [1, *[channels] * (layers - 1), scale * scale]
    made = []
    for i, (cin, cout) in enumerate(pairwise(sizes)):
        unit = (9 * cin) ** -0.5 * (0.1 if i == layers - 1 else 1.2)
        taps = (unit * rng.standard_normal((cin, 3, 3, cout))).astype(np.float32)
        bias = (rng.standard_normal(cout) / 20).astype(np.float32)
        made.append((taps, bias, (rng.random(cout) / 3).astype(np.float32)))
    base = rng.random((scale * scale, 5, 5)).astype(np.float32)
    return made, base / base.sum(axis=(1, 2), keepdims=True)


def band(
    channels: int, layers: int, scale: int, bits: int, width: int, height: int, **more: int
) -> tuple[dict[str, Any], dict[str, Array], list[int]]:
    """Push constants, arrays and parameter words of a call; `more`: tw, th, band, column, tiles."""
    tw, th, top = more["tw"], more["th"], more.get("band", 0)
    low, high = max(0, top - layers), min(height, top + th + layers)
    stride, wide = (-(-n * bits // 512) * 16 for n in (width, scale * width))
    rng = np.random.default_rng(width)
    arrays = {
        "src": rng.integers(0, 1 << 32, (high - low, stride), np.uint32),
        "w": nsr.pack(*network(channels, layers, scale)),
        "dst": np.zeros((scale * th, wide), np.uint32),
    }
    push = {"bits": bits, "stride": stride, "out_stride": wide, "tw": tw, "th": th}
    push |= {"channels": channels, "layers": layers, "scale": scale}
    words = [0] * 16
    given = {"N_TILES": more.get("tiles", 1), "WIDTH": width, "HEIGHT": height, "BAND_Y": top}
    for name, value in (given | {"SRC_Y": low, "COL0": more.get("column", 0)}).items():
        words[getattr(video, name)] = value
    return push, arrays, words


def seen(dst: Array, push: dict[str, Any], words: list[int]) -> Array:
    """The samples that a call has to write."""
    scale, tw = push["scale"], push["tw"]
    rows = min(push["th"], words[video.HEIGHT] - words[video.BAND_Y])
    left = words[video.COL0] * tw
    right = min(words[video.WIDTH], left + words[video.N_TILES] * tw)
    samples = dst.view(np.uint8 if push["bits"] == 8 else np.uint16)
    return samples[: scale * rows, scale * left : scale * right].astype(int)


CASES = [
    (8, 6, 2, 8, 100, 40, {"tw": 52, "th": 40, "tiles": 2}),
    (16, 7, 2, 8, 100, 70, {"tw": 52, "th": 70, "tiles": 2}),
    (16, 7, 2, 16, 37, 11, {"tw": 20, "th": 6, "band": 6, "tiles": 2}),
    (8, 6, 3, 8, 61, 21, {"tw": 32, "th": 10, "band": 10, "tiles": 2}),
    (8, 6, 4, 8, 61, 21, {"tw": 32, "th": 10, "band": 10, "column": 1}),
    (16, 7, 4, 16, 61, 21, {"tw": 64, "th": 22}),
    (16, 7, 3, 16, 61, 21, {"tw": 64, "th": 22}),
    (16, 2, 2, 8, 1, 1, {"tw": 4, "th": 2}),
    (8, 9, 2, 8, 70, 80, {"tw": 72, "th": 80}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:6])))
def test_nsr(runner: Runner, case: tuple[Any, ...]) -> None:
    push, arrays, words = band(*case[:6], **case[6])
    want = seen(reference("nsr", push, arrays, words)["dst"], push, words)
    for variant in runner.variants("nsr", nsr.variant_for(push["channels"])):
        after = runner.run("nsr", variant, push, arrays, words, words[0])["dst"]
        # Activations are halves between the layers of a GPU's kernel.
        most = 1 if push["bits"] == 8 else 16
        assert np.abs(seen(after, push, words) - want).max() <= most, variant
        rows = push["scale"] * min(push["th"], words[video.HEIGHT] - words[video.BAND_Y])
        assert not after[rows:].any(), "a row that the frame does not have"


def test_where_tiles_are_cut_changes_no_sample(runner: Runner) -> None:
    # Also within a tile: a wide one has strips of several widths.
    for channels, width, widths in ((8, 90, (24, 128)), (16, 90, (24, 128)), (8, 610, (64, 612))):
        found = []
        for tw in widths:
            sizes = {"tw": tw, "th": 30, "tiles": -(-width // tw)}
            push, arrays, words = band(channels, 5, 2, 8, width, 30, **sizes)
            name = nsr.variant_for(channels)
            after = runner.run("nsr", name, push, arrays, words, words[0])["dst"]
            found.append(seen(after, push, words))
        np.testing.assert_array_equal(found[0], found[1])


def test_how_many_threads_there_are_changes_no_sample() -> None:
    push, arrays, words = band(8, 5, 2, 8, 610, 31, tw=612, th=32)
    with_threads = [Runner(CpuBackend(n)) for n in (1, 2, 3, 7)]
    found = [r.run("nsr", "c8", push, arrays, words, 1)["dst"] for r in with_threads]
    for other in found[1:]:
        np.testing.assert_array_equal(seen(found[0], push, words), seen(other, push, words))


def test_where_bands_are_cut_changes_no_sample(runner: Runner) -> None:
    # A CPU gives rows by twos: also where a band begins or ends amid two of them.
    height, tops = 31, (0, 8, 14) if runner.backend.info.kind == "gpu" else (0, 7, 9, 16)
    for channels, bits in ((8, 8), (16, 16)):
        push, arrays, words = band(channels, 5, 2, bits, 50, height, tw=52, th=32)
        name = nsr.variant_for(channels)
        after = runner.run("nsr", name, push, arrays, words, words[0])["dst"]
        whole = seen(after, push, words)
        for top, end in pairwise((*tops, height)):
            cut, some, at = band(channels, 5, 2, bits, 50, height, tw=52, th=end - top, band=top)
            some["src"] = arrays["src"][at[video.SRC_Y] :][: len(some["src"])]
            after = runner.run("nsr", name, cut, some, at, at[0])["dst"]
            np.testing.assert_array_equal(seen(after, cut, at), whole[2 * top : 2 * end])


def test_weights_are_packed_for_each_form() -> None:
    for channels, layers, scale in ((8, 6, 2), (16, 7, 3), (16, 3, 4)):
        given, base = network(channels, layers, scale)
        flat = nsr.pack(given, base)
        found, filters = nsr.unpack(flat, channels, layers, scale)
        for layer, wanted in zip(found, given, strict=True):
            for a, b in zip(layer, wanted, strict=True):
                np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(filters, base)
        # The product for a tap, or for two pixels of a row, is the convolution's.
        pixels = 16 // channels
        across, hidden = (pixels + 2) // pixels, layers - 2
        words = 3 * across * 128
        first = flat[-hidden * (words + 512) :][:words].view(np.float16)
        matrices = first.reshape(3, across * pixels, channels, pixels, channels)
        taps = given[1][0]
        for p in range(pixels):
            got = matrices[:, p : p + 3, :, p].astype(np.float32)
            np.testing.assert_allclose(got, taps.transpose(1, 2, 0, 3), atol=1e-3)


def test_a_network_that_is_too_deep_does_not_fit() -> None:
    for variant in kernels.op("nsr").variants:
        assert nsr.fits(variant, 7, 2)
        assert not nsr.fits(variant, 30, 2)


INT8_CASES = [
    (8, 6, 2, 8, 100, 40, {"tw": 52, "th": 40, "tiles": 2}, {}),
    (16, 7, 2, 16, 37, 11, {"tw": 20, "th": 6, "band": 6, "tiles": 2}, {}),
    (16, 5, 3, 8, 61, 21, {"tw": 64, "th": 22}, {}),
    (8, 9, 2, 8, 70, 50, {"tw": 72, "th": 50}, {7: 0, 4: 2}),
    (32, 4, 4, 8, 61, 21, {"tw": 64, "th": 22}, {}),
]


@pytest.mark.parametrize("case", INT8_CASES, ids=lambda case: "-".join(map(str, case[:6])))
def test_nsr_int8(runner: Runner, case: tuple[Any, ...]) -> None:
    if runner.backend.info.kind == "gpu":
        misfit: Any = getattr(runner.backend, "misfit", None)
        assert misfit("nsr_int8", "int8"), "the operation has no GLSL"
        return
    channels, layers, scale = case[:3]
    push, arrays, words = band(*case[:6], **case[6])
    given, base = network(channels, layers, scale)
    skips = {at: (source, np.full(channels, 0.2, np.float32)) for at, source in case[7].items()}
    low, high = np.linspace(-2, -1, channels), np.linspace(2, 4, channels)
    ranges = [np.stack([low, high], 1).astype(np.float32)] * (layers - 1)
    arrays["w"] = nsr_int8.pack(given, base, ranges, skips)
    want = seen(reference("nsr_int8", push, arrays, words)["dst"], push, words)
    after = runner.run("nsr_int8", "int8", push, arrays, words, words[0])["dst"]
    error = np.abs(seen(after, push, words) - want)
    # A float that lies between two bytes is rounded to either.
    assert error.max() <= (1 if push["bits"] == 8 else 257)
    assert error.mean() < 0.02 * (1 if push["bits"] == 8 else 257)


def test_bytes_come_near_to_floats() -> None:
    given, base = network(8, 6, 2)
    push, arrays, words = band(8, 6, 2, 8, 64, 32, tw=64, th=32)
    arrays["src"] = (calibrate.pictures()[0][:, :64] * 255).astype(np.uint8).view(np.uint32)
    want = seen(reference("nsr", push, arrays, words)["dst"], push, words)
    ranges = calibrate.ranges(given, {})
    arrays["w"] = nsr_int8.pack(given, base, ranges)
    got = seen(reference("nsr_int8", push, arrays, words)["dst"], push, words)
    error = float(np.mean((got - want) ** 2))
    assert 10 * np.log10(255**2 / max(error, 1e-9)) > 45


CHROMA_CASES = [
    (2, 8, 1, 0, 37, 21),
    (2, 16, 2, 1, 37, 21),
    (3, 8, 2, 0, 23, 9),
    (4, 16, 1, 0, 1, 1),
]


@pytest.mark.parametrize("case", CHROMA_CASES, ids=lambda case: "-".join(map(str, case)))
def test_nsr_chroma(runner: Runner, case: tuple[int, ...]) -> None:
    if runner.backend.info.kind == "gpu":
        return  # the operation has no GLSL
    scale, bits, step, component, width, height = case
    half, high, layers, th, tw = (width + 1) // 2, (height + 1) // 2, 3, 6, 8
    tiles = -(-half // tw)
    rng = np.random.default_rng(width)
    maps = -(-scale * scale // 4) * 4
    parts = []
    for cin, cout, unit in ((5, 8, 0.15), (8, 8, 0.12), (8, maps, 0.01)):
        parts += [unit * rng.standard_normal(9 * cin * cout), rng.standard_normal(cout) / 20]
        parts.append(rng.random(cout) / 3)
    base = rng.random((scale**2, 25))
    parts.append((base / base.sum(1, keepdims=True)).reshape(-1))
    stride, luma, wide = (
        -(-n * bits // 512) * 16 for n in (half * step, width, scale * half * step)
    )
    top = min(th, (high - 1) // th * th)
    low, end = max(0, top - layers), min(high, top + th + layers)
    y_low, y_end = max(0, 2 * low), min(height, 2 * end)
    arrays = {
        "src": rng.integers(0, 1 << 32, (end - low, stride), np.uint32),
        "luma": rng.integers(0, 1 << 32, (y_end - y_low, luma), np.uint32),
        "w": np.concatenate(parts).astype(np.float32),
        "dst": np.zeros((scale * th, wide), np.uint32),
    }
    push = {"bits": bits, "stride": stride, "out_stride": wide, "tw": tw, "th": th, "channels": 8}
    push |= {"layers": layers, "scale": scale, "step": step, "component": component}
    push |= {"luma_stride": luma}
    words = [0] * 16
    given = {"N_TILES": tiles, "WIDTH": width, "HEIGHT": height, "SRC_Y": y_low, "C_WIDTH": half}
    given |= {"C_HEIGHT": high, "C_BAND_Y": top, "C_SRC_Y": low}
    for name, value in given.items():
        words[getattr(video, name)] = value
    want = reference("nsr_chroma", push, arrays, words)["dst"]
    got = runner.run("nsr_chroma", "f32", push, arrays, words, tiles)["dst"]
    kind = np.uint8 if bits == 8 else np.uint16
    rows = scale * min(th, high - top)
    error = got.view(kind).astype(int) - want.view(kind)
    assert np.abs(error[:rows]).max() <= (1 if bits == 8 else 16)
    assert want[:rows].any()
    assert not got[rows:].any(), "a row that the plane does not have"
