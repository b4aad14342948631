# SPDX-License-Identifier: Apache-2.0
"""Plain bilinear scaling in numpy, for frames that come while there is no daemon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Plain:
    """Scales planes of 8 bits between two fixed shapes; `step` samples lie beside each other for
    one place (2: the Cb and Cr of NV12)."""

    def __init__(self, small: tuple[int, int], large: tuple[int, int], step: int = 1) -> None:
        self._step = step
        self._across = _places(small[1] // step, large[1] // step)
        top, bottom, weight = _places(small[0], large[0])
        self._down = top, bottom, weight[:, None]
        self._shape = large

    def __call__(self, plane: NDArray[Any]) -> NDArray[np.uint8]:
        """The plane in its larger shape."""
        top, bottom, weight = self._down
        rows = _mix(plane[top], plane[bottom], weight)
        left, right, weight = self._across
        if self._step == 1:
            made = _mix(rows.take(left, 1), rows.take(right, 1), weight)
        else:
            pairs = rows.reshape(rows.shape[0], -1, self._step)
            made = _mix(pairs.take(left, 1), pairs.take(right, 1), weight[:, None])
        return made.reshape(self._shape)


def _places(small: int, large: int) -> tuple[Any, Any, Any]:
    """For each sample: its two neighbours and the second one's weight, of 256."""
    at = np.clip((np.arange(large) + 0.5) * small / large - 0.5, 0, small - 1)
    first = at.astype(np.intp)
    second = np.minimum(first + 1, small - 1)
    return first, second, ((at - first) * 256).astype(np.uint16)


def _mix(first: NDArray[Any], second: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.uint8]:
    made = first * (256 - weight) + second * weight  # at most 255 * 256: fits 16 bits
    made += np.minimum(127, 0xFFFF - made)
    made >>= 8
    result: NDArray[np.uint8] = made.astype(np.uint8)
    return result


def scalers(
    small: Sequence[tuple[int, int]], large: Sequence[tuple[int, int]], pixel: str
) -> list[Plain]:
    """One for each plane; shapes are (rows, samples)."""
    steps = [2 if pixel == "nv12" and index else 1 for index in range(len(small))]
    return [Plain(a, b, step) for a, b, step in zip(small, large, steps, strict=True)]
