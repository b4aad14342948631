# SPDX-License-Identifier: Apache-2.0
"""Operators of ONNX on constants: what is computed from shapes, and of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine.importers.onnx_wire import Array


def size(op: str, given: list[Array]) -> int:
    """Elements of a result, at most, before it is computed."""
    if op == "Concat":
        return sum(v.size for v in given)
    if op == "Gather":
        return given[0].size * given[1].size
    if op in ("Add", "Sub", "Mul", "Div"):
        return int(np.prod(np.broadcast_shapes(*(v.shape for v in given)), dtype=object))
    return max((v.size for v in given), default=0)


def _fold_constant(a: Mapping[str, Any], *_: Any) -> Array:
    for key in ("value", "value_float", "value_int", "value_floats", "value_ints"):
        if key in a:
            return np.asarray(a[key])
    raise KeyError("value")


def _fold_reshape(a: Mapping[str, Any], x: Array, dims: Array) -> Array:
    return x.reshape([x.shape[k] if n == 0 else int(n) for k, n in enumerate(dims.reshape(-1))])


def _fold_axes(a: Mapping[str, Any], axes: Array | None) -> list[int]:
    return [int(n) for n in (a.get("axes") or [] if axes is None else axes.reshape(-1))]


def _fold_unsqueeze(a: Mapping[str, Any], x: Array, axes: Array | None = None) -> Array:
    return np.expand_dims(x, tuple(_fold_axes(a, axes)))


def _fold_squeeze(a: Mapping[str, Any], x: Array, axes: Array | None = None) -> Array:
    return np.squeeze(x, tuple(_fold_axes(a, axes)) or None)


def _fold_slice(a: Mapping[str, Any], x: Array, *more: Array | None) -> Array:
    lists = [v.reshape(-1).tolist() for v in more if v is not None]
    lists = lists or [a["starts"], a["ends"], *([a["axes"]] if a.get("axes") else [])]
    starts, ends = lists[:2]
    axes = lists[2] if len(lists) > 2 else range(len(starts))
    steps = lists[3] if len(lists) > 3 else [1] * len(starts)
    cut = [slice(None)] * x.ndim
    for s, e, axis, step in zip(starts, ends, axes, steps, strict=True):
        cut[int(axis)] = slice(int(s), int(e), int(step))
    return x[tuple(cut)]


def _fold_constant_of_shape(a: Mapping[str, Any], shape: Array) -> Array:
    dims = [int(n) for n in shape.reshape(-1)]
    if int(np.prod(dims, dtype=object)) > 1 << 16:
        raise ValueError("too large")
    value = np.asarray(a.get("value", np.zeros(1, np.float32))).reshape(-1)
    return np.full(dims, value[0], value.dtype)


def _fold_cast(a: Mapping[str, Any], x: Array) -> Array:
    return x.astype({1: "f4", 6: "i4", 7: "i8", 9: "?", 10: "f2", 11: "f8"}[a["to"]])


def _fold_div(a: Mapping[str, Any], x: Array, y: Array) -> Array:
    whole = x.dtype.kind in "iu" and y.dtype.kind in "iu"
    return x // y if whole else x / y


FOLDED: Mapping[str, Callable[..., Any]] = {
    "Constant": _fold_constant,
    "Identity": lambda a, x: x,
    "Shape": lambda a, x: np.array(x.shape, np.int64),
    "Gather": lambda a, x, i: np.take(x, i.astype(np.int64), axis=a.get("axis", 0)),
    "Unsqueeze": _fold_unsqueeze,
    "Squeeze": _fold_squeeze,
    "Concat": lambda a, *parts: np.concatenate(parts, axis=a.get("axis", 0)),
    "Slice": _fold_slice,
    "Cast": _fold_cast,
    "Add": lambda a, x, y: x + y,
    "Sub": lambda a, x, y: x - y,
    "Mul": lambda a, x, y: x * y,
    "Div": _fold_div,
    "Floor": lambda a, x: np.floor(x),
    "Ceil": lambda a, x: np.ceil(x),
    "Sqrt": lambda a, x: np.sqrt(x),
    "Reshape": _fold_reshape,
    "Transpose": lambda a, x: np.transpose(x, a.get("perm") or None),
    "ConstantOfShape": _fold_constant_of_shape,
}
