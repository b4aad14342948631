# SPDX-License-Identifier: Apache-2.0
"""How far video results are from an estimate, in C and by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.backends.library import held


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize(("scale", "sparse"), [(2, 4), (3, 8), (4, 1), (1, 2)])
@pytest.mark.parametrize("shape", [(33, 70), (1, 1), (2, 41)])
def test_results_are_held_against_an_estimate(
    dtype: type, scale: int, sparse: int, shape: tuple[int, int]
) -> None:
    """What the C function sums up, by numpy."""
    rng = np.random.default_rng(scale)
    (height, width), most = shape, np.iinfo(dtype).max
    low = rng.integers(0, most, (height, width + 3), dtype, True)[:, :width]
    high = rng.integers(0, most, (scale * height, scale * width + 5), dtype, True)
    high = high[:, : scale * width]
    around = np.pad(low.astype(np.float64), 1, mode="edge")

    def beside(down: int, right: int) -> Any:
        cut = around[1 + down : 1 + down + height, 1 + right : 1 + right + width]
        return cut[::sparse, ::sparse]

    mid, near = beside(0, 0), (scale - 1) / (2 * scale)
    up = mid + near * (beside(-1, 0) - mid)
    across = beside(0, -1) + near * (beside(-1, -1) - beside(0, -1))
    error = high[:: scale * sparse, :: scale * sparse] - (up + near * (across - up))
    steps = sum(abs(beside(*at) - mid) for at in ((-1, 0), (0, -1), (1, 0), (0, 1)))
    firsts = np.unique([0, mid.shape[1] // 2])
    each = [part.sum(0) for part in (error, abs(error), steps)]
    want = np.add.reduceat(each, firsts, 1)
    got = held(low, high, scale, sparse, firsts)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * most)


@pytest.mark.parametrize(
    "high",
    [np.zeros((8, 7), np.uint8), np.zeros((8, 8), np.uint16), np.zeros((8, 16), "u1")[:, ::2]],
)
def test_what_is_no_result_is_not_read(high: Any) -> None:
    with pytest.raises(ValueError, match="no result of"):
        held(np.zeros((4, 5), np.uint8), high, 2, 1, np.array([0]))


@pytest.mark.parametrize("firsts", [[0, 2], [0, 1 << 40], [-1, 0], [0, 9, 1]])
def test_a_tile_beside_the_plane_is_not_read(firsts: list[int]) -> None:
    low, high = np.zeros((4, 8), np.uint8), np.zeros((8, 16), np.uint8)
    with pytest.raises(ValueError, match="begins beside a plane of 8 columns"):
        held(low, high, 2, 4, np.array(firsts))
