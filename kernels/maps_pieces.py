# SPDX-License-Identifier: Apache-2.0
"""Pieces (kernels/pieces.py) of calls of the operations on feature maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kernels import maps, video
from kernels.contract import ceil_div
from kernels.maps_out.op import core
from kernels.piece import Array, Piece

LINES = 4


def _lines(push: dict[str, Any], reach: int, rng: Any) -> tuple[dict[str, Any], int, int]:
    """Push constants for some rows with `reach` rows around, the first pixel of a block that they
    take, and how many.
    """
    first = int(rng.integers(ceil_div(push["h"], LINES))) * LINES
    lines, xs = min(LINES, push["h"] - first), int(push["xs"])
    begin = int(push["origin"]) + (first - reach) * xs - reach
    pixels = (lines + 2 * reach) * xs + 2 * reach
    more = {"h": lines, "ps": pixels, "origin": reach * (xs + 1)}
    return {**push, **more}, begin, pixels


def _runs(
    push: Mapping[str, Any], begin: int, pixels: int, blocks: int, lanes: int
) -> list[tuple[int, int]]:
    each = 4 * lanes
    return [(each * (b * push["ps"] + begin), each * pixels) for b in range(blocks)]


def _conv2d(push: dict[str, Any], params: Any, sizes: Any, read: Any, rng: Any) -> Piece:
    part, begin, pixels = _lines(push, int(push["k"]) // 2, rng)
    blocks, lanes = ceil_div(push["cout"], push["yl"]), int(push["yl"])
    outputs = _runs(push, begin, pixels, blocks, lanes)
    takes = {
        "x": _runs(push, begin, pixels, ceil_div(push["cin"], push["xl"]), int(push["xl"])),
        "w": [(0, sizes["w"])],
        "r": outputs if push["residual"] else [(0, 4)],
        "y": outputs,
    }
    return Piece(params, part, takes, {"y": lambda y: maps.view(y, blocks, lanes, part)})


def _pointwise(push: dict[str, Any], params: Any, sizes: Any, read: Any, rng: Any) -> Piece:
    part, begin, pixels = _lines(push, 0, rng)
    blocks, lanes = int(push["blocks"]), int(push["lanes"])
    runs = _runs(push, begin, pixels, blocks, lanes)
    takes = {"a": runs, "b": runs, "w": [(0, sizes["w"])], "y": runs}
    return Piece(params, part, takes, {"y": lambda y: maps.view(y, blocks, lanes, part)})


def _whole(push: dict[str, Any], params: Any, sizes: Any, read: Any, rng: Any) -> Piece:
    """All of it, where that is little enough to be copied."""
    blocks, lanes = int(push.get("blocks", 1)), int(push["lanes"])
    takes = {name: [(0, size)] for name, size in sizes.items()}
    return Piece(params, push, takes, {"y": lambda y: maps.view(y, blocks, lanes, push)})


def _image(
    push: Mapping[str, Any], stride: int, begin: int, end: int, rows: int
) -> Callable[[Array], Array]:
    """Samples begin..end-1 of the first rows."""
    each = stride * (4 if push["bits"] == 8 else 2)

    def look(array: Array) -> Array:
        samples = video.samples(array, push["bits"])
        return samples[: samples.size // each * each].reshape(-1, each)[:rows, begin:end]

    return look


def _maps_out(push: dict[str, Any], params: Any, sizes: Any, read: Any, rng: Any) -> Piece:
    x0, y0, x1, y1 = core(params, push)
    step = int(push["step"])
    takes = {name: [(0, size)] for name, size in sizes.items()}
    look = _image(push, int(push["stride"]), step * x0, step * x1, y1 - y0)
    return Piece(params, push, takes, {"dst": look})


def _plane_scale(push: dict[str, Any], params: Any, sizes: Any, read: Any, rng: Any) -> Piece:
    by = 2 if push["half"] else 1
    rows = ceil_div(int(params[maps.CORE_Y1]), by) - int(params[maps.CORE_Y0]) // by
    takes = {name: [(0, size)] for name, size in sizes.items()}
    width = int(push["step"] * push["s"] * push["plane_w"])
    look = _image(push, int(push["out_stride"]), 0, width, int(push["s"]) * rows)
    return Piece(params, push, takes, {"dst": look})


MAKERS: Mapping[str, Callable[..., Piece]] = {
    "conv2d": _conv2d,
    "pointwise": _pointwise,
    "resize": _whole,
    "pixel_shuffle": _whole,
    "maps_in": _whole,
    "maps_out": _maps_out,
    "plane_scale": _plane_scale,
}
