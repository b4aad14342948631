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
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import BadModel, UnsupportedModel
from engine.forms import ONE, TWO, Form, flag, real, whole, word
from engine.graph import Change, Node
from kernels.resize.op import MOST_TAPS

F32 = npt.NDArray[np.float32]
INPUT = "input"
MAX_CHANNELS, MAX_SIDE, MAX_SCALE, MAX_NODES = 4096, 11, 8, 20000
MAX_RATIO = 64
ACTS = ("slope", "silu", "sigmoid", "gate")
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
