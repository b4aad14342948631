# SPDX-License-Identifier: Apache-2.0
"""A convolutional network as a graph: what importers build, passes change and lowering reads.

Values are maps of `channels` channels at `scale` times the size of the network's input. Nodes
(inputs -> output; weights by name in `arrays`, float32; attributes):

    conv     x [, r] -> y; w [cout, cin, k, k], bias, slope; k, cout, act, residual (r is
             added behind)
    act      x -> y; slope (of `slope` alone); act
    affine   x -> y; scale, shift: a number a channel
    sum      a, b -> y; alpha, beta: alpha a + beta b
    product  a, b -> y
    concat   values -> y, channels one after the other
    slice    x -> y; begin, end: channels
    shuffle  x -> y; s, deep (order of channels: s*s positions of all channels), down (back)
    resize   x [, r] -> y; filters (kernels/resize); num, den, taps

Acts are slope (PReLU; 1 is none, 0 ReLU), silu, sigmoid, and gate: (x + r) * (sigmoid(x) - 1/2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import BadModel, UnsupportedModel
from engine.forms import ONE, TWO, Form, flag, real, whole, word
from engine.graph import Attr, Change, Node
from kernels.resize.op import MOST_TAPS

F32 = npt.NDArray[np.float32]
INPUT = "input"
MAX_CHANNELS, MAX_SIDE, MAX_SCALE, MAX_NODES = 4096, 11, 8, 20000
MAX_RATIO = 64
ACTS = ("slope", "silu", "sigmoid", "gate")
MAX_ELEMENTS = 1 << 28  # of a convolution, after groups and dilation became zeros
_FACTOR = real(-3e38, 3e38)
FORMS: Mapping[str, Form] = {
    "conv": Form((1, 2), (3, 3), {
        "k": whole(1, MAX_SIDE), "cout": whole(1, MAX_CHANNELS), "act": word(*ACTS),
        "residual": flag(),
    }),
    "act": Form(ONE, (0, 1), {"act": word(*ACTS[:3])}),
    "affine": Form(ONE, TWO),
    "sum": Form(TWO, attrs={"alpha": _FACTOR, "beta": _FACTOR}),
    "product": Form(TWO),
    "concat": Form((1, MAX_CHANNELS)),
    "slice": Form(ONE, attrs={"begin": whole(0, MAX_CHANNELS), "end": whole(1, MAX_CHANNELS)}),
    "shuffle": Form(ONE, attrs={"s": whole(1, MAX_SCALE), "deep": flag(), "down": flag()}),
    "resize": Form((1, 2), ONE, {
        "num": whole(1, MAX_RATIO), "den": whole(1, MAX_RATIO), "taps": whole(1, MOST_TAPS),
        "residual": flag(),
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """Maps: so many channels, at `scale` times the input's size."""

    channels: int
    scale: Fraction


@dataclass(frozen=True)
class Net:
    """A network with one input and one output."""

    nodes: tuple[Node, ...]
    values: Mapping[str, Value]
    arrays: Mapping[str, F32]
    output: str
    log: tuple[Change, ...] = ()

    def users(self) -> dict[str, list[Node]]:
        """Nodes by the value that they read; the output has one more user than these."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs):
                found.setdefault(value, []).append(node)
        return found

    def single(self, users: Mapping[str, list[Node]], value: str) -> bool:
        """Is a value read by one node alone?"""
        return value != self.output and len(users.get(value, ())) == 1

    def producers(self) -> dict[str, Node]:
        return {node.output: node for node in self.nodes}

    def array(self, node: Node, i: int) -> F32:
        """The i-th weight of a node."""
        return self.arrays[node.weights[i]]

    @property
    def scale(self) -> int:
        """How many times larger the output is."""
        return int(self.values[self.output].scale)

    @property
    def colours(self) -> int:
        """Channels of input and output: 1 (luma) or 3 (red, green, blue)."""
        return self.values[INPUT].channels

    def to_json(self) -> dict[str, Any]:
        """As JSON data, without the arrays."""
        return {
            "nodes": [node.to_json() for node in self.nodes],
            "values": {
                name: [v.channels, v.scale.numerator, v.scale.denominator]
                for name, v in self.values.items()
            },
            "output": self.output,
            "log": [[c.name, c.nodes_before, c.nodes_after, c.note] for c in self.log],
        }

    @classmethod
    def from_json(cls, data: Any) -> Net:
        """What `to_json` wrote, without arrays; checked.

        Raises:
            BadModel
        """
        try:
            nodes = tuple(map(Node.from_json, data["nodes"]))
            values = {
                str(name): Value(int(c), Fraction(int(num), int(den)))
                for name, (c, num, den) in data["values"].items()
            }
            log = tuple(Change(str(n), int(b), int(a), str(t)) for n, b, a, t in data["log"])
            net = cls(nodes, values, {}, str(data["output"]), log)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            raise BadModel("The compiled model's network is damaged.") from None
        return net.check()

    def check(self) -> Net:
        """This network, when it holds together.

        Raises:
            BadModel: an unknown operation, a value that is read before it is written or unknown.
            UnsupportedModel: sizes that are not run.
        """
        known = {INPUT}
        for node in self.nodes:
            if node.op not in FORMS:
                raise BadModel(f"The network has an unknown operation {node.op!r}.")
            if wrong := node.misfit(FORMS[node.op]):
                raise BadModel(f"The network's node {node.name} {wrong}.")
            if missing := [v for v in node.inputs if v not in known]:
                raise BadModel(f"The network's node {node.name} reads {missing[0]!r} too early.")
            if node.output in known or node.output not in self.values:
                raise BadModel(f"The network's node {node.name} writes what it must not.")
            given = [self.values[v] for v in node.inputs if v in self.values]
            if len(given) != len(node.inputs) or self.values[node.output] != _made(node, given):
                raise BadModel(f"The network's node {node.name} does not fit what it reads.")
            known.add(node.output)
        if self.output not in known or INPUT not in self.values:
            raise BadModel("The network lacks its input or its output.")
        for name, value in self.values.items():
            if not 0 < value.channels <= MAX_CHANNELS:
                raise UnsupportedModel(f"The value {name} has {value.channels} channels.")
            if not 0 < value.scale <= MAX_SCALE * MAX_SCALE:
                raise UnsupportedModel(f"The value {name} is {value.scale} times the input's size.")
        first, last = self.values[INPUT], self.values[self.output]
        if first.channels not in (1, 3) or last.channels != first.channels:
            raise UnsupportedModel(
                f"The network makes {last.channels} channels of {first.channels}; what is run makes"
                " 3 of 3 (red, green, blue) or 1 of 1 (luma)."
            )
        if last.scale.denominator != 1 or not 1 <= last.scale <= MAX_SCALE:
            raise UnsupportedModel(
                f"The network enlarges {float(last.scale):g} times; 1 to {MAX_SCALE} are run."
            )
        return self


def _made(node: Node, given: list[Value]) -> Value | None:
    """What a node of the right form makes of its inputs; None when they do not fit it."""
    op, attrs = node.op, node.attrs
    x, residual = given[0], bool(attrs.get("residual"))
    if op == "concat":
        same = len({v.scale for v in given}) == 1
        return Value(sum(v.channels for v in given), x.scale) if same else None
    if op in ("sum", "product"):
        return x if given[1] == x else None
    if op in ("act", "affine"):
        return x
    if op == "slice":
        begin, end = node.int("begin"), node.int("end")
        return Value(end - begin, x.scale) if begin < end <= x.channels else None
    if op == "shuffle":
        s = node.int("s")
        if attrs["down"]:
            return Value(x.channels * s * s, x.scale / s)
        return None if x.channels % (s * s) else Value(x.channels // (s * s), x.scale * s)
    if len(given) != 1 + residual:
        return None
    if op == "resize":
        made = Value(x.channels, x.scale * Fraction(node.int("num"), node.int("den")))
    else:
        if not node.int("k") % 2 or (attrs["act"] == "gate" and not residual):
            return None
        made = Value(node.int("cout"), x.scale)
    return made if not residual or given[1] == made else None


def changed(net: Net, name: str, note: str, nodes: Iterable[Node], **other: Any) -> Net:
    """The network with other nodes and a line in its log, without what nobody uses any more."""
    nodes = tuple(nodes)
    arrays, values = other.pop("arrays", net.arrays), other.pop("values", net.values)
    output = other.get("output", net.output)
    wanted, kept = {output}, []
    for node in reversed(nodes):
        if node.output in wanted:
            wanted.update(node.inputs)
            kept.append(node)
    nodes = tuple(reversed(kept))
    used = {w for node in nodes for w in node.weights}
    change = Change(name, len(net.nodes), len(nodes), note)
    return replace(
        net,
        nodes=nodes,
        arrays={k: v for k, v in arrays.items() if k in used},
        values={k: v for k, v in values.items() if k in wanted or k == INPUT},
        log=(*net.log, change),
        **other,
    )


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
