# SPDX-License-Identifier: Apache-2.0
"""conv3x3_winograd on every instruction set: against the sum itself, and that where a value lies
in a map does not show.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.conv3x3.op import PAD
from kernels.conv3x3_winograd import op as winograd
from tests.kernels.harness import Runner, reference


def _case(cin: int, cout: int, rows: int, cols: int, xs: int, tiles: int = 1) -> tuple[Any, Any]:
    x_tile, y_tile = (rows + 2) * cin * xs + 64, rows * cout * xs + 128
    push = {
        "cin": cin, "cout": cout, "rows": rows, "cols": cols, "xs": xs,
        "x_tile": x_tile, "y_tile": y_tile,
    }  # fmt: skip
    rng = np.random.default_rng(cin)
    w = rng.normal(0, (9 * cin) ** -0.5, 9 * cin * cout + 2 * cout).astype(np.float32)
    x = rng.normal(0, 1, tiles * x_tile + PAD).astype(np.float32)
    return push, {"x": x, "w": w, "y": np.full(tiles * y_tile, np.nan, np.float32)}


def _maps(y: np.ndarray, push: dict[str, int], tile: int = 0) -> np.ndarray:
    """What means something: [row, channel, column]."""
    rows, cout, xs = push["rows"], push["cout"], push["xs"]
    at = tile * push["y_tile"]
    return y[at : at + rows * cout * xs].reshape(rows, cout, xs)[:, :, : push["cols"]]


@pytest.mark.parametrize(
    ("cin", "cout", "rows", "cols", "xs"),
    [(24, 32, 4, 64, 64), (32, 24, 2, 84, 96), (32, 32, 6, 132, 144), (64, 24, 2, 256, 272)],
)
def test_winograd(runner: Runner, cin: int, cout: int, rows: int, cols: int, xs: int) -> None:
    if runner.backend.info.kind == "gpu":
        misfit: Any = getattr(runner.backend, "misfit", None)
        assert misfit("conv3x3_winograd", "cpu"), "the operation has no GLSL"
        return
    push, arrays = _case(cin, cout, rows, cols, xs, 2)
    params = [2]
    want = reference("conv3x3_winograd", push, arrays, params)["y"]
    got = runner.run("conv3x3_winograd", "cpu", push, arrays, params, 2)["y"]
    for tile in range(2):
        np.testing.assert_allclose(_maps(got, push, tile), _maps(want, push, tile), 0, 1e-5)


def test_where_values_lie_does_not_show(runner: Runner) -> None:
    if runner.backend.info.kind == "gpu":
        return
    push, arrays = _case(32, 32, 4, 136, 144)
    whole = _maps(runner.run("conv3x3_winograd", "cpu", push, arrays, [1])["y"], push)
    inner, pieces = _case(32, 32, 2, 72, 80)
    x = arrays["x"][: 6 * 32 * 144].reshape(6, 32, 144)
    pieces["x"][: 4 * 32 * 80] = x[2:, :, 60 : 60 + 80].reshape(-1)
    cut = _maps(runner.run("conv3x3_winograd", "cpu", inner, pieces, [1])["y"], inner)
    np.testing.assert_array_equal(cut, whole[2:, :, 60 : 60 + 72])


def test_columns_that_a_chain_needs() -> None:
    chain = [(1, 32), (32, 32), (32, 32), (32, 4)]
    assert winograd.needed(chain, 8) == [20, 18, 16, 12, 8]
    assert winograd.needed([(1, 8), (8, 8), (8, 4)], 8) == [14, 12, 10, 8]
