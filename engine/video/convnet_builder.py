# SPDX-License-Identifier: Apache-2.0
"""The operators of importers' files as the nodes of a Net (convnet_graph): what has no node of its
own, such as groups, holes and transposed convolutions, becomes one that there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from engine.errors import BadModel, UnsupportedModel
from engine.graph import Attr, Node
from engine.video.convnet_graph import (
    F32,
    INPUT,
    MAX_CHANNELS,
    MAX_NODES,
    MAX_RATIO,
    MAX_SCALE,
    MAX_SIDE,
    Net,
    Value,
    changed,
)
from kernels.resize.op import MOST_TAPS

MAX_ELEMENTS = 1 << 28  # of a convolution, after groups and dilation became zeros


def unsupported(op: str, node: str, why: str = "") -> UnsupportedModel:
    """The error about an operator, named with its node."""
    said = f": {why}" if why else ""
    return UnsupportedModel(f"The operator {op} (node {node}) is not run{said}.")


@dataclass
class Builder:
    """Makes a Net node by node. Methods take the node's name and values and give the output's
    name; `op` is what the source file calls the operator, for errors.
    """

    channels: int
    nodes: list[Node] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    arrays: dict[str, F32] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values[INPUT] = Value(self.channels, Fraction(1))

    def finish(self, output: str) -> Net:
        """The network.

        Raises:
            BadModel, UnsupportedModel: as Net.check.
        """
        net = Net(tuple(self.nodes), self.values, self.arrays, output)
        return changed(net.check(), "import", "as the file has it", self.nodes)

    def _add(
        self,
        name: str,
        op: str,
        inputs: tuple[str, ...],
        value: Value,
        weights: Mapping[str, Any] | None = None,
        **attrs: Attr,
    ) -> str:
        if len(self.nodes) >= MAX_NODES:
            raise UnsupportedModel(f"The network has more than {MAX_NODES} operations.")
        number = len(self.nodes)
        output, names = f"v{number}", []
        for key, array in (weights or {}).items():
            names.append(f"{number}.{key}")
            self.arrays[names[-1]] = np.ascontiguousarray(array, np.float32)
            if not np.isfinite(self.arrays[names[-1]]).all():
                raise BadModel(f"The weights of {name} have numbers that are not finite.")
        self.nodes.append(Node(name, op, inputs, output, tuple(names), attrs))
        self.values[output] = value
        return output

    def _vector(self, name: str, op: str, numbers: Any, channels: int) -> F32:
        flat = np.asarray(numbers, np.float32).reshape(-1)
        if flat.size not in (1, channels):
            raise unsupported(op, name, f"{flat.size} numbers for {channels} channels")
        return np.broadcast_to(flat, (channels,))

    def conv(
        self,
        name: str,
        op: str,
        x: str,
        w: F32,
        bias: F32 | None,
        *,
        groups: int = 1,
        strides: Iterable[int] = (1, 1),
        dilations: Iterable[int] = (1, 1),
        pads: Iterable[int] = (0, 0, 0, 0),
    ) -> str:
        """A convolution; w [cout, cin / groups, rows, columns]; pads: top, left, bottom, right."""
        cin, source = self.values[x].channels, self.values[x]
        if w.ndim != 4 or groups < 1 or w.shape[0] % groups or w.shape[1] * groups != cin:
            raise unsupported(op, name, f"weights {list(w.shape)} for {cin} channels")
        if tuple(strides) != (1, 1):
            raise unsupported(op, name, "steps of more than one sample")
        steps = tuple(dilations)
        rows, columns = ((n - 1) * d + 1 for n, d in zip(w.shape[2:], steps, strict=True))
        side = max(rows, columns)
        if rows % 2 == 0 or columns % 2 == 0 or side > MAX_SIDE or min(steps) < 1:
            raise unsupported(op, name, f"a kernel of {rows}x{columns}")
        if tuple(pads) != (rows // 2, columns // 2, rows // 2, columns // 2):
            raise unsupported(op, name, "padding that changes the size")
        cout = w.shape[0]
        if cout * cin * side * side > MAX_ELEMENTS or cout > MAX_CHANNELS:
            raise unsupported(op, name, f"{cin} to {cout} channels")
        # Groups, holes and oblong kernels are zeros in a dense one.
        dense = np.zeros((cout, cin, side, side), np.float32)
        top, left = (side - rows) // 2, (side - columns) // 2
        inside = dense[:, :, top : top + rows : steps[0], left : left + columns : steps[1]]
        each = cout // groups
        for g in range(groups):
            part = slice(g * each, (g + 1) * each)
            inside[part, g * w.shape[1] : (g + 1) * w.shape[1]] = w[part]
        offset = np.zeros(cout) if bias is None else self._vector(name, op, bias, cout)
        weights = {"w": dense, "bias": offset, "slope": np.ones(cout)}
        value = Value(cout, source.scale)
        attrs: dict[str, Attr] = {"k": side, "cout": cout, "act": "slope", "residual": False}
        return self._add(name, "conv", (x,), value, weights, **attrs)

    def deconv(
        self,
        name: str,
        op: str,
        x: str,
        w: F32,
        bias: F32 | None,
        *,
        stride: int,
        pad: int,
        more: int = 0,
    ) -> str:
        """A transposed convolution, w [cin, cout, k, k], as a convolution that makes the s * s
        phases of the result, and a pixel shuffle. `more`: output padding.
        """
        cin = self.values[x].channels
        if w.ndim != 4 or w.shape[0] != cin or w.shape[2] != w.shape[3]:
            raise unsupported(op, name, f"weights {list(w.shape)} for {cin} channels")
        k, s, cout = w.shape[2], stride, w.shape[1]
        if not 1 <= s <= MAX_SCALE or k - 2 * pad + more != s:
            raise unsupported(op, name, "a size that is no multiple of the input's")
        # Phase r of the output takes kernel row r + pad - s * t from input row t further on.
        reach = max(max((s - 1 + pad) // s, 0), max((k - 1 - pad) // s, 0))
        side = 2 * reach + 1
        if side > MAX_SIDE or cout * s * s > MAX_CHANNELS:
            raise unsupported(op, name, f"a kernel of {k}x{k}")
        phases = np.zeros((cout, s, s, cin, side, side), np.float32)
        for a in range(s):
            for b in range(s):
                for i in range(side):
                    for j in range(side):
                        y, z = a + pad - s * (i - reach), b + pad - s * (j - reach)
                        if 0 <= y < k and 0 <= z < k:
                            phases[:, a, b, :, i, j] = w[:, :, y, z].T
        dense = phases.reshape(cout * s * s, cin, side, side)
        offset = None if bias is None else np.repeat(self._vector(name, op, bias, cout), s * s)
        out = self.conv(name, op, x, dense, offset, pads=(reach,) * 4)
        return self.shuffle(name, op, out, s) if s > 1 else out

    def act(self, name: str, op: str, x: str, act: str, slope: Any = 1.0) -> str:
        """An activation."""
        value = self.values[x]
        weights = {"slope": self._vector(name, op, slope, value.channels)}
        return self._add(name, "act", (x,), value, weights if act == "slope" else {}, act=act)

    def affine(self, name: str, op: str, x: str, scale: Any, shift: Any) -> str:
        """scale * x + shift, a number a channel or one for all."""
        value = self.values[x]
        numbers = {"scale": scale, "shift": shift}
        weights = {k: self._vector(name, op, v, value.channels) for k, v in numbers.items()}
        return self._add(name, "affine", (x,), value, weights)

    def _pair(self, name: str, op: str, a: str, b: str) -> Value:
        if self.values[a] != self.values[b]:
            raise unsupported(op, name, "values of different sizes")
        return self.values[a]

    def sum(self, name: str, op: str, a: str, b: str, alpha: float = 1.0, beta: float = 1.0) -> str:
        """alpha * a + beta * b."""
        value = self._pair(name, op, a, b)
        return self._add(name, "sum", (a, b), value, alpha=float(alpha), beta=float(beta))

    def product(self, name: str, op: str, a: str, b: str) -> str:
        """a * b."""
        return self._add(name, "product", (a, b), self._pair(name, op, a, b))

    def concat(self, name: str, op: str, parts: list[str]) -> str:
        """Channels of all parts."""
        values = [self.values[p] for p in parts]
        if not parts or len({v.scale for v in values}) != 1:
            raise unsupported(op, name, "values of different sizes")
        if len(parts) == 1:
            return parts[0]
        value = Value(sum(v.channels for v in values), values[0].scale)
        return self._add(name, "concat", tuple(parts), value)

    def slice(self, name: str, op: str, x: str, begin: int, end: int) -> str:
        """Channels begin..end-1."""
        value = self.values[x]
        if not 0 <= begin < end <= value.channels:
            raise unsupported(op, name, f"channels {begin} to {end} of {value.channels}")
        if (begin, end) == (0, value.channels):
            return x
        return self._add(name, "slice", (x,), Value(end - begin, value.scale), begin=begin, end=end)

    def shuffle(
        self, name: str, op: str, x: str, s: int, deep: bool = False, down: bool = False
    ) -> str:
        """A pixel shuffle, or its reverse (`down`)."""
        value = self.values[x]
        if not 1 <= s <= MAX_SCALE or (not down and value.channels % (s * s)):
            raise unsupported(op, name, f"{value.channels} channels, block size {s}")
        if down:
            value = Value(value.channels * s * s, value.scale / s)
        else:
            value = Value(value.channels // (s * s), value.scale * s)
        return self._add(name, "shuffle", (x,), value, s=s, deep=deep, down=down)

    def resize(
        self,
        name: str,
        op: str,
        x: str,
        ratio: Fraction,
        mode: str,
        *,
        centred: bool = True,
        floor: bool = True,
        a: float = -0.75,
    ) -> str:
        """Another size: nearest, linear or cubic. Positions are between the samples' centres
        (`centred`) or corners; the nearest one is below (`floor`) or by rounding, ties down.
        """
        value = self.values[x]
        if not 0 < ratio.numerator <= MAX_RATIO or ratio.denominator > MAX_RATIO:
            raise unsupported(op, name, f"a ratio of {float(ratio):g}")
        if ratio == 1:
            return x
        rows, start = resampling(ratio, mode, centred, floor, a)
        if rows.shape[1] > MOST_TAPS:
            raise unsupported(op, name, f"the mode {mode}")
        filters = np.concatenate([rows.reshape(-1), start])
        return self._add(
            name,
            "resize",
            (x,),
            Value(value.channels, value.scale * ratio),
            {"filters": filters},
            num=ratio.numerator,
            den=ratio.denominator,
            taps=int(rows.shape[1]),
            residual=False,
        )


def resampling(ratio: Fraction, mode: str, centred: bool, floor: bool, a: float) -> tuple[F32, F32]:
    """Weights [num, taps] and first indices [num] of the phases of kernels/resize."""
    num, den = ratio.numerator, ratio.denominator
    i = np.arange(num)
    place = [Fraction(2 * int(n) + 1, 2) / ratio - Fraction(1, 2) for n in i]
    if not centred:
        place = [int(n) / ratio for n in i]
    below = np.array([p.__floor__() for p in place])
    t = np.array([float(p - p.__floor__()) for p in place])
    if mode == "nearest":
        # In whole numbers: a place on a sample must not round to the one below.
        whole = [int(n) * den // num for n in i]
        start = np.array(whole) if floor else below + (t > 0.5)
        return np.ones((num, 1), np.float32), start.astype(np.float32)
    if mode == "linear":
        return np.stack([1 - t, t], 1).astype(np.float32), below.astype(np.float32)

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((x - 5) * x + 8) * x * a - 4 * a

    rows = np.stack([far(1 + t), near(t), near(1 - t), far(2 - t)], 1)
    return rows.astype(np.float32), (below - 1).astype(np.float32)
