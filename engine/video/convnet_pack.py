# SPDX-License-Identifier: Apache-2.0
"""The weights of a Net as kernels read them: one blob, in which each node's begin at a multiple of
256 bytes, where a binding may begin on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from engine.errors import UnsupportedModel
from engine.graph import Node
from engine.video.convnet_graph import Net
from engine.video.convnet_layout import Form, Layout
from kernels.contract import ceil_div
from kernels.conv2d import op as conv2d
from kernels.maps import THIN

Bytes = npt.NDArray[np.uint8]

FORMATS = ("f16", "q8")
ALIGN = 256
COPY = "copy"  # the name of the constants with which a part is copied
_HALF_MOST = 65504.0


def conv_format(fmt: str, source: Form) -> str:
    """Weights of the first layers stay halves: they are few and everything depends on them."""
    return "f16" if source.lanes == THIN else fmt


def inputs(source: Form) -> int:
    """Channels of a value that a convolution reads, gaps included."""
    return ceil_div(max(source.channels) + 1, 4) * 4


def sizes(net: Net, made: Layout, fmt: str) -> dict[str, int]:
    """Bytes of each node's weights, by its output."""
    found: dict[str, int] = {}
    most = 0
    for node in net.nodes:
        form = made.forms[node.output]
        if node.op == "conv":
            source = made.forms[node.inputs[0]]
            cin, cout = inputs(source), net.values[node.output].channels
            named = conv_format(fmt, source)
            found[node.output] = conv2d.nbytes(named, cin, cout, node.int("k"))
        elif node.op == "resize":
            found[node.output] = 4 * (node.int("taps") + 1) * node.int("num")
        elif node.op in ("act", "affine", "sum", "product"):
            found[node.output] = 16 * form.blocks * form.lanes
        elif node.op == "concat" and made.copies.get(node.output):
            most = max(most, *(made.forms[p].blocks for p, _ in made.copies[node.output]))
    if most:
        found[COPY] = 16 * 16 * most
    return found


def offsets(found: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each node's weights begin, and the bytes of all."""
    at, places = 0, {}
    for name, nbytes in found.items():
        places[name] = at
        at += ceil_div(nbytes, ALIGN) * ALIGN
    return places, max(at, ALIGN)


def chunks(net: Net, made: Layout, fmt: str) -> Iterator[Bytes]:
    """The blob, piece by piece.

    Raises:
        UnsupportedModel: weights that no half holds.
    """
    nodes = {n.output: n for n in net.nodes}
    total = 0
    for name, nbytes in sizes(net, made, fmt).items():
        data = constants(nbytes // 16) if name == COPY else _packed(net, made, fmt, nodes[name])
        if data.nbytes != nbytes:
            raise ValueError(f"{name} has {data.nbytes} bytes, not {nbytes}")
        total += ceil_div(nbytes, ALIGN) * ALIGN
        yield np.pad(data, (0, -nbytes % ALIGN))
    if not total:
        yield np.zeros(ALIGN, np.uint8)


def constants(
    n: int, s: npt.ArrayLike = 1.0, t: npt.ArrayLike = 0.0, u: npt.ArrayLike = 0.0,
    slope: npt.ArrayLike = 1.0, channels: tuple[int, ...] = (),
) -> Bytes:  # fmt: skip
    """Those of kernels/pointwise for n channels in all; arrays hold for `channels`."""
    out = np.zeros((4, n), np.float32)
    for row, value in zip(out, (s, t, u, slope), strict=True):
        row[list(channels) or slice(None)] = value
    return out.reshape(-1).view(np.uint8)


def _packed(net: Net, made: Layout, fmt: str, node: Node) -> Bytes:
    form = made.forms[node.output]
    n, own = form.blocks * form.lanes, form.channels
    if node.op == "conv":
        source = made.forms[node.inputs[0]]
        w, bias, slope = (net.array(node, k) for k in range(3))
        dense = np.zeros((w.shape[0], inputs(source), *w.shape[2:]), np.float32)
        dense[:, list(source.channels)] = w
        named = conv_format(fmt, source)
        if named == "f16" and np.abs(w).max(initial=0) > _HALF_MOST:
            raise UnsupportedModel(f"The node {node.name} has weights that are too large for f16.")
        packed: Bytes = conv2d.pack(named, dense, bias, slope)
        return packed
    if node.op == "resize":
        return net.array(node, 0).view(np.uint8)
    if node.op == "affine":
        return constants(n, net.array(node, 0), net.array(node, 1), channels=own)
    if node.op == "sum":
        return constants(n, float(node.attrs["alpha"]), u=float(node.attrs["beta"]))
    if node.op == "act" and node.weights:
        return constants(n, slope=net.array(node, 0), channels=own)
    return constants(n)
