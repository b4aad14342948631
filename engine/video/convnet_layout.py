# SPDX-License-Identifier: Apache-2.0
"""Where the values of a Net lie: lanes, blocks and channels of each (kernels/maps.py), and which
share memory.

Everything follows from the network alone, so that weights that were packed when the model was
compiled fit on every device. A concatenation costs nothing where its parts can be computed in
place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from engine.errors import UnsupportedModel
from engine.graph import Attr, Node
from engine.video.convnet_graph import INPUT, Net, Value, changed
from kernels.contract import ceil_div
from kernels.maps import THIN, WIDE

MAX_BLOCKS = 1024


@dataclass(frozen=True)
class Form:
    """Of a value: lanes and blocks, and at which channel of these each of its own lies."""

    lanes: int
    blocks: int
    channels: tuple[int, ...]

    @property
    def plain(self) -> bool:
        """Do the channels lie one after the other from the first on?"""
        return self.channels == tuple(range(len(self.channels)))


@dataclass(frozen=True)
class Place:
    """The group of a value, and its first block there. Values of a group share one buffer."""

    group: int
    block: int


@dataclass(frozen=True)
class Layout:
    """`copies`: by concatenation, the parts that have to be copied and the block for each."""

    forms: Mapping[str, Form]
    places: Mapping[str, Place]
    blocks: tuple[int, ...]  # of each group
    copies: Mapping[str, tuple[tuple[str, int], ...]]


def aligned(net: Net) -> Net:
    """The network with a 1x1 convolution where channels have to be moved: slices that do not begin
    at a block, and what is neither a convolution nor a concatenation and reads channels with gaps.
    """
    nodes, values, arrays = [], dict(net.values), dict(net.arrays)
    forms = _forms(net)
    moved: dict[str, str] = {}

    def move(x: str, begin: int, end: int, y: str, name: str) -> Node:
        n = end - begin
        w = np.zeros((n, values[x].channels, 1, 1), np.float32)
        w[np.arange(n), np.arange(begin, end)] = 1
        weights = {f"{y}.w": w, f"{y}.bias": np.zeros(n), f"{y}.slope": np.ones(n)}
        arrays.update({k: np.asarray(v, np.float32) for k, v in weights.items()})
        values[y] = Value(n, values[x].scale)
        attrs: dict[str, Attr] = {"k": 1, "cout": n, "act": "slope", "residual": False}
        return Node(name, "conv", (x,), y, tuple(weights), attrs)

    for node in net.nodes:
        if node.op == "slice":
            x, begin, end = node.inputs[0], node.int("begin"), node.int("end")
            if begin % WIDE or not forms[x].plain:
                nodes.append(move(x, begin, end, node.output, node.name))
                continue
        # A convolution's first input may have gaps, its residual not.
        reads = [
            v
            for k, v in enumerate(node.inputs)
            if node.op != "concat" and not (node.op == "conv" and k == 0) and not forms[v].plain
        ]
        for x in dict.fromkeys(reads):
            if x not in moved:
                moved[x] = f"{x}.moved"
                nodes.append(move(x, 0, values[x].channels, moved[x], f"{node.name}.moved"))
        if reads:
            node = replace(node, inputs=tuple(moved[v] if v in reads else v for v in node.inputs))
        nodes.append(node)
    output = net.output
    if not forms[output].plain:
        nodes.append(move(output, 0, values[output].channels, f"{output}.moved", "output"))
        output = f"{output}.moved"
    note = f"{len(moved)} values whose channels are moved"
    return changed(net, "aligned", note, nodes, values=values, arrays=arrays, output=output).check()


def _tied(net: Net) -> Iterable[tuple[str, ...]]:
    """Values that have the same lanes."""
    for node in net.nodes:
        if node.op in ("act", "affine", "sum", "product", "resize", "concat", "slice"):
            yield (*node.inputs, node.output)
        elif node.op == "conv" and len(node.inputs) > 1:
            yield node.inputs[1], node.output


def _forms(net: Net) -> dict[str, Form]:
    wide = {name for name, value in net.values.items() if value.channels > THIN}
    for node in net.nodes:
        if node.op in ("concat", "slice"):
            wide.update((*node.inputs, node.output))
    ties = list(_tied(net))
    before = -1
    while len(wide) != before:
        before = len(wide)
        for tie in ties:
            if not wide.isdisjoint(tie):
                wide.update(tie)
    forms: dict[str, Form] = {}
    for name in (INPUT, *(n.output for n in net.nodes)):
        n, lanes = net.values[name].channels, WIDE if name in wide else THIN
        forms[name] = Form(lanes, ceil_div(n, lanes), tuple(range(n)))
    for node in net.nodes:
        if node.op != "concat":
            continue
        channels: list[int] = []
        blocks = 0
        for part in node.inputs:
            channels += [WIDE * blocks + c for c in forms[part].channels]
            blocks += forms[part].blocks
        if blocks > MAX_BLOCKS:
            raise UnsupportedModel(f"The network's node {node.name} joins too many channels.")
        forms[node.output] = Form(WIDE, blocks, tuple(channels))
    return forms


def layout(net: Net) -> Layout:
    """Where the values of an aligned network lie."""
    forms = _forms(net)
    places: dict[str, Place] = {}
    blocks: list[int] = []
    copies: dict[str, tuple[tuple[str, int], ...]] = {}
    views = {n.output: n for n in net.nodes if n.op == "slice"}

    def group(n: int) -> int:
        blocks.append(n)
        return len(blocks) - 1

    # The widest first: what it is made of begins with what narrower ones are made of, mostly.
    joins = [n for n in net.nodes if n.op == "concat"]
    for node in sorted(joins, key=lambda n: -forms[n.output].blocks):
        where = _joined(node, forms, places) if node.output not in places else None
        if where is not None:
            places[node.output] = where
            continue
        whole = places.get(node.output)
        if whole is None:
            whole = places[node.output] = Place(group(forms[node.output].blocks), 0)
        at, moved = whole.block, []
        for part in node.inputs:
            if part in places or part in views:
                if places.get(part) != Place(whole.group, at):
                    moved.append((part, at))
            else:
                places[part] = Place(whole.group, at)
            at += forms[part].blocks
        copies[node.output] = tuple(moved)
    for name in (INPUT, *(n.output for n in net.nodes)):
        if name in places:
            continue
        if name in views:
            node = views[name]
            source = places[node.inputs[0]]
            places[name] = Place(source.group, source.block + node.int("begin") // WIDE)
        else:
            places[name] = Place(group(forms[name].blocks), 0)
    return Layout(forms, places, tuple(blocks), copies)


def _joined(node: Node, forms: Mapping[str, Form], places: Mapping[str, Place]) -> Place | None:
    """Where a concatenation lies whose parts lie one behind the other already."""
    first = places.get(node.inputs[0])
    if first is None:
        return None
    at = first.block
    for part in node.inputs:
        if places.get(part) != Place(first.group, at):
            return None
        at += forms[part].blocks
    return first


@dataclass(frozen=True)
class Buffers:
    """Which buffer each group lies in, and of each buffer its scale, lanes and most blocks."""

    of: tuple[int, ...]
    kinds: tuple[tuple[Fraction, int], ...]
    blocks: tuple[int, ...]


def buffers(net: Net, made: Layout) -> Buffers:
    """Buffers of the groups: one that nobody reads any more serves the next of its kind. Values of
    one kind have one geometry, so that the borders of a buffer stay zero.
    """
    last: dict[int, int] = {}
    kinds: dict[int, tuple[Fraction, int]] = {}
    first: dict[int, int] = {}
    for i, node in enumerate(net.nodes):
        for name in (*node.inputs, node.output):
            g = made.places[name].group
            last[g] = i
            first.setdefault(g, i)
            kinds[g] = (net.values[name].scale, made.forms[name].lanes)
    result = made.places[net.output].group
    last[result] = len(net.nodes)
    entry = made.places[INPUT].group
    first[entry] = -1
    last.setdefault(entry, len(net.nodes))
    kinds.setdefault(entry, (Fraction(1), made.forms[INPUT].lanes))
    kinds.setdefault(result, kinds[entry])
    of = [-1] * len(made.blocks)
    shapes: list[tuple[Fraction, int]] = []
    sizes: list[int] = []
    free: list[int] = []
    for i in range(-1, len(net.nodes)):
        for g in (g for g, at in first.items() if at == i):
            fitting = [b for b in free if shapes[b] == kinds[g]]
            # The smallest that is large enough, or the largest of all, which grows.
            fitting.sort(key=lambda b: (sizes[b] < made.blocks[g], abs(sizes[b] - made.blocks[g])))
            if fitting:
                b = fitting[0]
                free.remove(b)
                sizes[b] = max(sizes[b], made.blocks[g])
            else:
                b = len(sizes)
                shapes.append(kinds[g])
                sizes.append(made.blocks[g])
            of[g] = b
        free += [of[g] for g, at in last.items() if at == i and of[g] >= 0]
    return Buffers(tuple(of), tuple(shapes), tuple(sizes))
