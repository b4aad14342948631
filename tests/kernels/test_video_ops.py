# SPDX-License-Identifier: Apache-2.0
"""The video operations on every instruction set and the GPU.

Numbers are dyadic and small, so that every order of additions gives the same float and samples
have to be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kernels
from kernels import video
from kernels.conv3x3.op import PAD, variant_for
from kernels.resample.op import table
from tests.kernels.harness import Runner, reference

Array = npt.NDArray[Any]
Check = Callable[..., dict[str, Array]]


def dyadic(seed: int, size: int | tuple[int, ...], steps: int, unit: float) -> Array:
    """Random multiples of `unit`, at most `steps` of them to either side."""
    values = np.random.default_rng(seed).integers(-steps, steps + 1, size)
    return (values * unit).astype(np.float32)


def words(seed: int, rows: int, stride: int) -> Array:
    return np.random.default_rng(seed).integers(0, 1 << 32, (rows, stride), np.uint32)


def params(**values: int) -> list[int]:
    """The parameter words by the names of kernels.video."""
    out = [0] * 16
    for name, value in values.items():
        out[getattr(video, name)] = value
    return out


def check_samples(
    runner: Runner,
    op: str,
    push: dict[str, Any],
    arrays: dict[str, Array],
    given: list[int],
    width: int,
    variant: str = "base",
) -> None:
    """The first `width` samples of each row of dst are the reference's; the rest is nobody's."""
    got = runner.run(op, variant, push, arrays, given, 2)["dst"]
    want = reference(op, push, arrays, given, 2)["dst"]
    dtype = np.uint8 if push["bits"] == 8 else np.uint16
    np.testing.assert_array_equal(got.view(dtype)[:, :width], want.view(dtype)[:, :width])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("width", "height", "band", "column"), [(1, 1, 0, 0), (37, 11, 4, 0), (37, 11, 8, 1)]
)
def test_luma_in(
    check_op: Check, bits: int, width: int, height: int, band: int, column: int
) -> None:
    tw, th, halo, xs, tiles = 16, 4, 6, 32, 2
    low, high = max(0, band - halo), min(height, band + th + halo)
    stride = 16 if bits == 8 else 32
    y_tile = (th + 2 * halo) * xs + 64
    push = {
        "bits": bits,
        "stride": stride,
        "tw": tw,
        "th": th,
        "halo": halo,
        "xs": xs,
        "y_tile": y_tile,
        "scale": 1 / 256,
    }
    given = params(N_TILES=tiles, WIDTH=width, HEIGHT=height, BAND_Y=band, SRC_Y=low, COL0=column)
    arrays = {"src": words(1, high - low, stride), "y": np.full(3 * y_tile, np.nan, np.float32)}
    got = check_op("luma_in", "base", push, arrays, given, tokens=3)
    assert np.isnan(got["y"][2 * y_tile :]).all()  # a tile that the slice does not have


@pytest.mark.parametrize(
    ("cin", "cout", "rows", "xs"), [(1, 8, 5, 16), (8, 8, 3, 48), (8, 16, 2, 32), (16, 4, 3, 144)]
)
def test_conv3x3(check_op: Check, cin: int, cout: int, rows: int, xs: int) -> None:
    x_tile, y_tile = (rows + 2) * cin * xs + 64, rows * cout * xs + 128
    x = dyadic(2, 2 * x_tile + PAD, 64, 1 / 16)
    w = dyadic(3, cin * 9 * cout + 2 * cout, 32, 1 / 32)
    push = {
        "cin": cin,
        "cout": cout,
        "rows": rows,
        "xs": xs,
        "x_tile": x_tile,
        "y_tile": y_tile,
    }
    arrays = {"x": x, "w": w, "y": np.full(3 * y_tile, np.nan, np.float32)}
    check_op("conv3x3", variant_for(cout), push, arrays, params(N_TILES=2), 3, (1e-6, 1e-6))


def test_conv3x3_wide_layers_in_any_variant(check_op: Check) -> None:
    x_tile = 5 * 8 * 16
    push = {"cin": 8, "cout": 8, "rows": 3, "xs": 16, "x_tile": x_tile, "y_tile": x_tile}
    arrays = {
        "x": dyadic(4, x_tile + PAD, 64, 1 / 16),
        "w": dyadic(5, 8 * 9 * 8 + 16, 32, 1 / 32),
        "y": np.zeros(x_tile, np.float32),
    }
    for variant in kernels.op("conv3x3").variants:
        check_op("conv3x3", variant.name, push, arrays, params(N_TILES=1), 1, (1e-6, 1e-6))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(
    ("scale", "width", "height", "halo", "column"),
    [(2, 1, 1, 6, 0), (2, 40, 6, 7, 1), (3, 23, 9, 6, 0), (4, 40, 6, 7, 1), (4, 1, 1, 6, 0)],
)
def test_shuffle_out(
    runner: Runner, bits: int, scale: int, width: int, height: int, halo: int, column: int
) -> None:
    tw, th, xs, tiles = 20, 4, 48, 2
    maps = -(-scale * scale // 4) * 4
    f_tile, x_tile = th * maps * xs + 64, (th + 2 * halo) * xs + 64
    band = height // 2 // 2 * 2
    stride = -(-scale * width * bits // 8 // 64) * 16
    f = dyadic(7, 2 * f_tile + PAD, 64, 1 / 256)
    f[5] = np.nan  # becomes 0 on every device
    push = {
        "bits": bits, "scale": scale, "step": 1, "component": 0, "plane": video.WIDTH,
        "stride": stride, "tw": tw, "th": th, "halo": halo, "xs": xs, "x_row": xs,
        "f_tile": f_tile, "x_tile": x_tile,
    }  # fmt: skip
    arrays = {
        "f": f,
        "x": np.abs(dyadic(6, 2 * x_tile + PAD, 256, 1 / 256)),
        "base": dyadic(8, 25 * scale**2, 4, 1 / 8),
        "dst": np.zeros((scale * th, stride), np.uint32),
    }
    given = params(N_TILES=tiles, WIDTH=width, HEIGHT=height, BAND_Y=band, COL0=column)
    check_samples(runner, "shuffle_out", push, arrays, given, scale * width, f"x{scale}")


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("component", [0, 1])
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_shuffle_out_of_chroma_by_turns(
    runner: Runner, bits: int, scale: int, component: int
) -> None:
    """A chroma plane of pairs, from a network with five inputs; the row has no room for the last
    pixel's last samples.
    """
    width, height, tw, th, halo, xs = 11, 5, 8, 2, 2, 16
    maps = -(-scale * scale // 4) * 4
    f_tile, x_row = th * maps * xs, 5 * xs
    x_tile = (th + 2 * halo) * x_row
    stride = (2 * scale * width - 2) * bits // 8 // 4
    push = {
        "bits": bits, "scale": scale, "step": 2, "component": component, "plane": video.C_WIDTH,
        "stride": stride, "tw": tw, "th": th, "halo": halo, "xs": xs, "x_row": x_row,
        "f_tile": f_tile, "x_tile": x_tile,
    }  # fmt: skip
    before = words(11, scale * th, stride)
    dtype = np.uint8 if bits == 8 else np.uint16
    before.view(dtype)[:, component::2] = 0  # what the first component leaves for the second
    arrays = {
        "f": dyadic(7, 2 * f_tile + PAD, 64, 1 / 256),
        "x": np.abs(dyadic(6, 2 * x_tile + PAD, 256, 1 / 256)),
        "base": dyadic(8, 25 * scale**2, 4, 1 / 8),
        "dst": before,
    }
    given = params(N_TILES=2, C_WIDTH=width, C_HEIGHT=height, C_BAND_Y=2)
    got = runner.run("shuffle_out", f"x{scale}", push, arrays, given, 2)["dst"].view(dtype)
    want = reference("shuffle_out", push, arrays, given, 2)["dst"].view(dtype)
    np.testing.assert_array_equal(got[:, component::2], want[:, component::2])
    if component:
        np.testing.assert_array_equal(got[:, 0::2], before.view(dtype)[:, 0::2])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    ("width", "height", "band", "column"), [(1, 1, 0, 0), (37, 12, 4, 1), (22, 9, 8, 0)]
)
def test_chroma_in(
    check_op: Check, bits: int, step: int, width: int, height: int, band: int, column: int
) -> None:
    tw, th, halo, xs, tiles = 8, 2, 3, 16, 2
    half, high = (width + 1) // 2, (height + 1) // 2
    c_band = band // 2
    c_low, c_end = max(0, c_band - halo), min(high, c_band + th + halo)
    low, end = max(0, band - 2 * halo), min(height, band + 2 * (th + halo))
    stride, luma_stride = (-(-n * bits // 8 // 64) * 16 for n in (half * step, width))
    y_tile = (th + 2 * halo) * 5 * xs + 64
    push = {
        "bits": bits, "step": step, "component": step - 1, "stride": stride,
        "luma_stride": luma_stride, "tw": tw, "th": th, "halo": halo, "xs": xs, "y_tile": y_tile,
        "scale": 1 / 256,
    }  # fmt: skip
    given = params(
        N_TILES=tiles, COL0=column, WIDTH=width, HEIGHT=height, SRC_Y=low,
        C_WIDTH=half, C_HEIGHT=high, C_BAND_Y=c_band, C_SRC_Y=c_low,
    )  # fmt: skip
    arrays = {
        "src": words(1, c_end - c_low, stride),
        "luma": words(2, end - low, luma_stride),
        "y": np.full(3 * y_tile, np.nan, np.float32),
    }
    got = check_op("chroma_in", "base", push, arrays, given, tokens=3)
    assert np.isnan(got["y"][2 * y_tile :]).all()  # a tile that the slice does not have


@pytest.mark.parametrize(("channels", "rows", "offset", "xs"), [(8, 3, 1, 16), (16, 5, 7, 48)])
def test_skip_add(check_op: Check, channels: int, rows: int, offset: int, xs: int) -> None:
    tile = (rows + 2 * offset) * channels * xs + 64
    push = {"channels": channels, "rows": rows, "offset": offset, "xs": xs, "tile": tile}
    arrays = {
        "kept": dyadic(12, 2 * tile, 64, 1 / 16),
        "slope": dyadic(13, channels, 8, 1 / 8),
        "y": dyadic(14, 2 * tile, 64, 1 / 16),
    }
    check_op("skip_add", "base", push, arrays, params(N_TILES=2), 3, (0, 0))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(
    ("scale", "width", "height", "band"),
    [(2, 301, 3, 0), (2, 32, 7, 4), (3, 1, 1, 0), (4, 33, 7, 4)],
)
def test_filter_out(
    runner: Runner, bits: int, step: int, scale: int, width: int, height: int, band: int
) -> None:
    low, rows = max(0, band - 2), min(4, height - band)
    high = min(height, band + rows + 2)
    stride = -(-width * step * bits // 8 // 64) * 16
    out_stride = -(-(scale * width - 1) * step * bits // 8 // 64) * 16
    push = {
        "bits": bits, "step": step, "scale": scale, "stride": stride, "out_stride": out_stride,
        "rows": 4, "words": out_stride,
    }  # fmt: skip
    arrays = {
        "src": words(10, high - low, stride),
        "filters": np.abs(dyadic(9, 25 * scale**2, 8, 1 / 64)),
        "dst": np.zeros((4 * scale, out_stride), np.uint32),
    }
    given = params(
        N_TILES=1, C_WIDTH=width, C_HEIGHT=height, C_BAND_Y=band, C_SRC_Y=low, C_ROWS=rows
    )
    check_samples(runner, "filter_out", push, arrays, given, (scale * width - 1) * step)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("plane", [video.WIDTH, video.C_WIDTH])
def test_resample(runner: Runner, bits: int, step: int, plane: int) -> None:
    width, height, out, low = 23, 12, 31, 2
    stride, out_stride = (-(-n * step * bits // 8 // 64) * 16 for n in (width, out))
    rng = np.random.default_rng(3)
    down = table(rng.integers(low, height - 4, 9), np.abs(dyadic(1, (9, 4), 8, 1 / 32)))
    across = table(rng.integers(0, width - 3, out), np.abs(dyadic(2, (out, 3), 8, 1 / 32)))
    push = {
        "bits": bits, "step": step, "plane": plane, "stride": stride, "out_stride": out_stride,
        "width": out, "taps_down": 4, "taps_across": 3, "rows": 6,
    }  # fmt: skip
    arrays = {
        "src": words(10, height - low, stride),
        "down": down,
        "across": across,
        "dst": np.zeros((6, out_stride), np.uint32),
    }
    given = [0] * 16
    given[plane : plane + 5] = width, height, 4, low, 5
    check_samples(runner, "resample", push, arrays, given, out * step)


def test_values_are_rounded_half_up_and_held() -> None:
    x = np.array([-5, 0.49, 0.5, 254.5, 300, np.nan, np.inf], np.float32)
    assert video.quantise(x, 8).tolist() == [0, 0, 1, 255, 255, 0, 255]
