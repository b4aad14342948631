# SPDX-License-Identifier: Apache-2.0
"""The operations on feature maps on every instruction set and the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels import maps
from kernels.contract import FORMATS
from kernels.conv2d import op as conv2d
from kernels.maps import GATE, SIGMOID, SILU, SLOPE, THIN, WIDE, Geometry
from kernels.maps_samples import params, random_maps
from kernels.pointwise.op import ALONE, PRODUCT, SUM
from tests.kernels.harness import Runner, reference

Array = npt.NDArray[Any]
Check = Callable[..., dict[str, Array]]


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def filled(g: Geometry, blocks: int, lanes: int) -> Array:
    """Maps of NaN within zeros."""
    buffer = np.zeros(g.nbytes(blocks, lanes) // 4, np.float32)
    maps.view(buffer, blocks, lanes, g.push())[:] = np.nan
    return buffer


@pytest.mark.parametrize(
    ("cin", "cout", "k", "w", "h", "act", "residual"),
    [
        (16, 16, 3, 9, 6, SLOPE, 0),
        (20, 24, 3, 5, 9, SILU, 1),
        (48, 72, 3, 13, 5, GATE, 1),
        (4, 20, 3, 7, 4, SLOPE, 0),
        (16, 3, 3, 6, 5, SLOPE, 1),
        (32, 40, 1, 7, 3, SIGMOID, 0),
        (4, 4, 5, 8, 5, SLOPE, 1),
        (16, 8, 5, 1, 1, SLOPE, 0),
        (16, 96, 7, 4, 3, SLOPE, 0),
    ],
)
@pytest.mark.parametrize("fmt", ["f16", "q8"])
def test_conv2d(
    check_op: Check, fmt: str, cin: int, cout: int, k: int, w: int, h: int, act: int, residual: int
) -> None:
    g, r = Geometry(w, h, max(1, k // 2)), rng(cin + k)
    xl, yl = (THIN if n <= THIN else WIDE for n in (cin, cout))
    x = random_maps(r, g, -(-cin // xl), xl)
    other = random_maps(r, g, -(-cout // yl), yl)
    weights = r.standard_normal((cout, cin, k, k)).astype(np.float32) / (k * cin**0.5)
    packed = conv2d.pack(fmt, weights, *r.standard_normal((2, cout)).astype(np.float32))
    assert packed.nbytes == conv2d.nbytes(fmt, cin, cout, k)
    push = {"fmt": FORMATS[fmt], "cin": cin, "cout": cout, "k": k, "act": act}
    push |= {"residual": residual, "xl": xl, "yl": yl, **g.push()}
    arrays = {"x": x, "w": packed, "r": other, "y": filled(g, -(-cout // yl), yl)}
    check_op("conv2d", fmt, push, arrays, (), 1, (3e-5, 3e-5))


def test_conv2d_does_a_part_of_the_rows(check_op: Check) -> None:
    g, r = Geometry(10, 12, 1), rng(5)
    x, y = random_maps(r, g, 1, WIDE), filled(g, 1, WIDE)
    packed = conv2d.pack("f16", r.standard_normal((16, 16, 3, 3)) / 12, np.zeros(16), np.ones(16))
    push = {"fmt": FORMATS["f16"], "cin": 16, "cout": 16, "k": 3, "act": SLOPE, "residual": 0}
    push |= {"xl": WIDE, "yl": WIDE, **g.push()}
    part = {**push, "h": 4, "origin": g.origin + 4 * g.xs}
    got = check_op("conv2d", "f16", part, {"x": x, "w": packed, "r": x, "y": y}, (), 1, 3e-5)
    rows = maps.view(got["y"], 1, WIDE, g.push())[0]
    assert np.isnan(rows[:4]).all()
    assert np.isnan(rows[8:]).all()
    assert np.isfinite(rows[4:8]).all()


def test_weights_survive_packing() -> None:
    w = rng(1).standard_normal((20, 8, 3, 3)).astype(np.float32)
    bias, slope = rng(2).standard_normal((2, 20)).astype(np.float32)
    for fmt, error in (("f16", 1e-3), ("q8", 0.03)):
        packed = conv2d.pack(fmt, w, bias, slope)
        got, b, s = conv2d.unpack(fmt, packed, 8, 20, 3)
        assert got.shape == (24, 8, 3, 3)
        np.testing.assert_allclose(got[:20], w, atol=error * np.abs(w).max())
        np.testing.assert_array_equal(got[20:], 0)
        np.testing.assert_array_equal(b[:20], bias)
        np.testing.assert_array_equal(s[:20], slope)


def test_what_rounding_leaves_cancels_within_a_kernel() -> None:
    w = rng(3).standard_normal((16, 8, 3, 3)).astype(np.float32)
    whole, scale = conv2d.quantised(w)
    error = w - whole * np.repeat(scale.astype(np.float32), 4, 1)[:, :, None, None]
    assert np.abs(whole).max() <= 127
    assert np.abs(error.sum((2, 3))).max() < np.abs(error).sum((2, 3)).mean() / 2


def test_tiny_and_missing_weights_are_finite() -> None:
    w = np.zeros((8, 8, 1, 1), np.float32)
    w[0, 0], w[1, 4] = 1e-9, 60000
    got, _, _ = conv2d.unpack("q8", conv2d.pack("q8", w, np.zeros(8), np.ones(8)), 8, 8, 1)
    np.testing.assert_allclose(got, w, rtol=0.01, atol=1e-7)


@pytest.mark.parametrize(("mode", "act"), [(ALONE, SILU), (SUM, SLOPE), (PRODUCT, SIGMOID)])
@pytest.mark.parametrize(("blocks", "lanes"), [(1, THIN), (2, WIDE)])
def test_pointwise(check_op: Check, mode: int, act: int, blocks: int, lanes: int) -> None:
    g, r = Geometry(7, 3, 1), rng(mode)
    a, b = (random_maps(r, g, blocks, lanes) for _ in range(2))
    w = r.standard_normal(4 * blocks * lanes).astype(np.float32)
    push = {"blocks": blocks, "lanes": lanes, "mode": mode, "act": act, **g.push()}
    arrays = {"a": a, "b": b, "w": w, "y": filled(g, blocks, lanes)}
    check_op("pointwise", "base", push, arrays, (), 1, (1e-5, 1e-5))


@pytest.mark.parametrize(("num", "den", "taps"), [(2, 1, 1), (3, 2, 2), (1, 2, 4), (3, 4, 4)])
@pytest.mark.parametrize(("blocks", "lanes"), [(1, THIN), (2, WIDE)])
def test_resize(check_op: Check, num: int, den: int, taps: int, blocks: int, lanes: int) -> None:
    small, r = Geometry(8, 4, 1), rng(taps)
    large = Geometry(8 * num // den, 4 * num // den, 2)
    x, other = random_maps(r, small, blocks, lanes), random_maps(r, large, blocks, lanes)
    weights = r.standard_normal(num * taps)
    filters = np.concatenate([weights, r.integers(-2, 2, num)]).astype(np.float32)
    push = {"blocks": blocks, "lanes": lanes, "num": num, "den": den, "taps": taps}
    push |= {"residual": 1, **small.push("x_"), **large.push()}
    arrays = {"x": x, "filters": filters, "r": other, "y": filled(large, blocks, lanes)}
    check_op("resize", "base", push, arrays, (), 1, (1e-5, 1e-5))


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(("s", "channels"), [(2, 3), (3, 5), (4, 1)])
def test_pixel_shuffle_up_and_down(check_op: Check, s: int, channels: int, deep: bool) -> None:
    small, large, r = Geometry(3, 2, 1), Geometry(3 * s, 2 * s, 1), rng(s)
    order = (1, s * channels, channels) if deep else (s * s, s, 1)
    lanes = THIN if channels <= THIN else WIDE
    push: dict[str, int] = {"channels": channels, "s": s}
    push |= dict(zip(("cs", "as", "bs"), order, strict=True))
    blocks = -(-channels * s * s // WIDE)
    x = random_maps(r, small, blocks, WIDE)
    up = {**push, "blocks": 1, "lanes": lanes, "xl": WIDE, "down": 0}
    up |= {**small.push("x_"), **large.push()}
    got = check_op("pixel_shuffle", "base", up, {"x": x, "y": filled(large, 1, lanes)}, (), 1, 0)
    down = {**push, "blocks": blocks, "lanes": WIDE, "xl": lanes, "down": 1}
    down |= {**large.push("x_"), **small.push()}
    arrays = {"x": got["y"], "y": filled(small, blocks, WIDE)}
    back = check_op("pixel_shuffle", "base", down, arrays, (), 1, 0)
    want, found = (maps.view(v, blocks, WIDE, small.push()) for v in (x, back["y"]))
    n = channels * s * s
    want, found = (v.transpose(0, 3, 1, 2).reshape(-1, 2, 3)[:n] for v in (want, found))
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("half", "centred", "step", "add"), [(0, 0, 1, 0), (1, 0, 2, 1), (1, 1, 1, 1)]
)
def test_maps_in(check_op: Check, bits: int, half: int, centred: int, step: int, add: int) -> None:
    g, r, width, height = Geometry(9, 6, 1), rng(bits), 14, 9
    plane_w, plane_h = ((n + 1) // 2 if half else n for n in (width, height))
    src = r.integers(0, 1 << 32, (8, 16), np.uint32)
    push: dict[str, float] = {"bits": bits, "stride": 16, "step": step, "phase": step - 1}
    push |= {"half": half, "centred": centred, "plane_w": plane_w, "plane_h": plane_h, "add": add}
    push |= {"lanes": WIDE if add else THIN, **g.push()}
    push |= {f"{n}{k}": float(v) for n in "co" for k, v in enumerate(r.standard_normal(3) / 256)}
    lanes = int(push["lanes"])
    y = random_maps(r, g, 1, lanes) if add else filled(g, 1, lanes)
    check_op("maps_in", "base", push, {"src": src, "y": y}, params(X0=6, Y0=4), 1, (1e-5, 1e-4))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("half", "centred", "step"), [(0, 0, 1), (1, 0, 2), (1, 1, 1), (1, 0, 1)])
def test_maps_out(runner: Runner, bits: int, half: int, centred: int, step: int) -> None:
    s, g, r = 2, Geometry(20, 10, 1), rng(half + step)
    x = random_maps(r, g, 1, THIN)
    x[g.origin * THIN] = np.nan  # becomes 0 on every device
    window = params(X0=4, Y0=2, CORE_X0=8, CORE_Y0=4, CORE_X1=14, CORE_Y1=7)
    push: dict[str, float] = {"bits": bits, "stride": 16, "step": step, "half": half}
    push |= {"centred": centred, "frame_w": 28, "frame_h": 14, "s": s, "lanes": THIN, **g.push()}
    top = float((1 << bits) - 1)
    push |= {n: float(v * top) for n, v in zip(("c0", "c1", "c2"), r.random(3), strict=True)}
    push |= {n: float(v * top) for n, v in zip(("d0", "d1", "d2"), r.random(3), strict=True)}
    push["o"] = -0.1 * top
    arrays = {"x": x, "dst": np.zeros((6, 16), np.uint32)}
    got = runner.run("maps_out", "base", push, arrays, window, 1)["dst"]
    want = reference("maps_out", push, arrays, window, 1)["dst"]
    dtype = np.uint8 if bits == 8 else np.uint16
    by = 2 if half else 1
    rows, columns = slice(0, 6 // by), slice(16 * step // by, 28 * step // by)
    got, want = (v.view(dtype).astype(np.int64)[rows, columns] for v in (got, want))
    assert np.abs(got - want).max() <= 1
    assert np.ptp(want) > 20


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("step", "half", "s"), [(1, 0, 2), (2, 1, 3), (1, 1, 4)])
def test_plane_scale(runner: Runner, bits: int, step: int, half: int, s: int) -> None:
    r, width, height = rng(s), 7, 5
    src = r.integers(0, 1 << 32, (height, 8), np.uint32)
    stride = -(-s * width * step * bits // 32)
    starts = np.full(2 * s, -1)
    filters = np.concatenate([r.random(8 * s) / 2, starts]).astype(np.float32)
    by = 2 if half else 1
    window = params(CORE_Y0=2 * by, CORE_Y1=5 * by)
    push = {"bits": bits, "stride": 8, "out_stride": stride, "step": step, "half": half, "s": s}
    push |= {"plane_w": width, "plane_h": height, "rows": 3 * s}
    arrays = {"src": src, "filters": filters, "dst": np.zeros((3 * s, stride), np.uint32)}
    got = runner.run("plane_scale", "base", push, arrays, window, 1)["dst"]
    want = reference("plane_scale", push, arrays, window, 1)["dst"]
    dtype = np.uint8 if bits == 8 else np.uint16
    got, want = (v.view(dtype).astype(np.int64)[:, : s * width * step] for v in (got, want))
    assert np.abs(got - want).max() <= 1
    assert np.ptp(want) > 20
