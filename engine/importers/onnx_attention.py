# SPDX-License-Identifier: Apache-2.0
"""What an attention in an ONNX graph computes: its heads, their norms, rotary table and window.

Candidates are read from the graph (the softmax's shape, what cosines are taken of, the numbers that
masks are made with); which of them is meant shows in what the part gives for random values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.errors import UnsupportedModel
from engine.importers import rope
from engine.importers.onnx_numbers import attend, close, exact, rotated
from engine.importers.onnx_trace import TOKENS, Trace, strange
from engine.importers.onnx_wire import Array, OnnxNode
from engine.importers.rope import Rope


def heads_of(t: Trace, value: str, width: int) -> tuple[int, int]:
    """Heads, and elements of each: the softmax's shape tells. `width` is all of them together.

    Raises:
        UnsupportedModel: no softmax has such a shape.
    """
    for node in reversed(t.before(value, ())):
        shape = t.values[node.outputs[0]].shape
        if node.op == "Softmax" and node.outputs[0] in t.live and len(shape) >= 3:
            heads = int(np.prod(shape[:-2]))
            if width % heads == 0:
                return heads, width // heads
    raise strange("an attention", value)


def head_norms(t: Trace, value: str, given: Mapping[str, Array], dim: int) -> list[Array]:
    """Vectors of the norms of Q's and K's heads, when there are two."""
    found = []
    for node in t.before(value, given):
        live, held = t.sides(node)
        vector = len(live) == 1 and len(held) == 1 and held[0].shape == (dim,)
        if node.op == "Mul" and node.outputs[0] in t.live and vector:
            found.append(held[0])
    return found if len(found) == 2 else []


def recognised(
    t: Trace,
    value: str,
    qkv: list[Array],
    heads: int,
    dim: int,
    norms: list[Array],
    eps: float,
    out: Array,
) -> dict[str, Any] | None:
    """What an attention is, if it computes `out` of Q, K and V; None if it is another.

    `qkv` are values of [TOKENS, heads * dim] and twice [TOKENS, kv heads * dim], `norms` the
    vectors of Q's and K's heads or none, `eps` what their norms add, `out` is [TOKENS, heads, dim].

    Raises:
        UnsupportedModel: a window that TOKENS tokens cannot tell, or strange positions.
    """
    kv_heads = qkv[1].shape[1] // dim
    if qkv[0].shape[1] != heads * dim or qkv[1].shape != qkv[2].shape or not kv_heads:
        return None
    if heads % kv_heads or qkv[1].shape[1] % dim:
        return None
    tables = _rope(t, value)
    q, k, v = (a.reshape(TOKENS, -1, dim) for a in qkv)
    if norms:
        q, k = (
            x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * w
            for x, w in zip((q, k), norms, strict=True)
        )
    for turn in tables:
        table = turn.table(TOKENS)
        qr, kr = rotated(q, table), rotated(k, table)
        for window in _windows(t, value):
            if close(out, attend(qr, kr, v, dim**-0.5, window)):
                return {
                    "heads": heads, "kv_heads": kv_heads, "dim": dim, "rope": turn,
                    "scale": dim**-0.5, "window": window,
                }  # fmt: skip
    return None


def _windows(t: Trace, value: str) -> list[int]:
    """Windows that may be meant: none, or a number that the masks are made with.

    Raises:
        UnsupportedModel: a number that TOKENS tokens cannot tell.
    """
    numbers = set()
    for node in t.before(value, ()):
        if node.outputs[0] in t.live or node.op not in ("Sub", "Add", "Greater", "Less"):
            continue
        for name in node.inputs:
            array = t.values[name]
            given = name in t.graph.constants or _is_constant(t.maker.get(name))
            if given and array.size == 1 and array.dtype.kind in "iu":
                numbers.add(abs(int(array.reshape(-1)[0])))
    if far := [n for n in numbers if TOKENS < n < 1 << 30]:
        raise UnsupportedModel(
            f"The model's mask is made with the number {min(far)}, which may be a window; that"
            " is not supported in ONNX."
        )
    return [0, *sorted(n for n in numbers if 2 <= n < TOKENS)]


def _rope(t: Trace, value: str) -> list[Rope]:
    """Rotary tables that may be meant: what cosines are taken of, at position 1."""
    found = []
    for node in t.before(value, ()):
        if node.op != "Cos" or node.outputs[0] in t.live:
            continue
        angles = t.values[node.inputs[0]].astype(np.float64)
        if angles.size < TOKENS or angles.size % TOKENS:
            continue
        angles = angles.reshape(TOKENS, -1)
        half = angles.shape[1]
        if half % 2 == 0 and np.array_equal(angles[:, : half // 2], angles[:, half // 2 :]):
            half //= 2
        freqs = angles[1, :half]
        if not np.allclose(angles[:, :half], np.arange(TOKENS)[:, None] * freqs, rtol=1e-4):
            raise strange("rotary positions", node.name)
        for magnitude in {1.0, *_magnitudes(t, node.outputs[0])}:
            found.append(rope.made(exact(freqs), magnitude))
    return found


def _magnitudes(t: Trace, cos: str) -> list[float]:
    """Numbers that a cosine is multiplied with."""
    found = []
    for node in t.graph.nodes:
        if node.op == "Mul" and cos in node.inputs:
            other = t.values[node.inputs[1 - node.inputs.index(cos)]]
            if other.size == 1:
                found.append(float(other.reshape(-1)[0]))
    return found


def _is_constant(node: OnnxNode | None) -> bool:
    return node is not None and node.op == "Constant"
