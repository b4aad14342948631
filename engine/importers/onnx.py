# SPDX-License-Identifier: Apache-2.0
"""A network from an ONNX file.

The graph is followed once with an input of one size (the file's, where it states one), so that all
that is computed from shapes becomes numbers; the network itself has no size any more. What each
operator becomes: `onnx_operators`.
"""

from __future__ import annotations

import numpy as np

from engine.errors import BadModel, UnsupportedModel
from engine.importers import onnx_wire
from engine.importers.onnx_fold import FOLDED, size
from engine.importers.onnx_operators import HANDLERS, Draft, Known, Maps, View
from engine.importers.onnx_wire import Array, OnnxGraph, OnnxNode
from engine.video.convnet_builder import Builder, unsupported
from engine.video.convnet_graph import INPUT, Net

PROBE = (
    240,
    336,
)  # rows and columns of the input where the file says none: many numbers divide them
MAXFOLDED = 1 << 26  # elements of a constant that is computed


def load(fd: int) -> Net:
    """The network of a file. The descriptor stays the caller's.

    Raises:
        BadModel: no ONNX file, damaged or cut short.
        UnsupportedModel: names the operator and its node.
    """
    return build(onnx_wire.read(fd))


def build(graph: OnnxGraph) -> Net:
    """The network of a graph. Raises as `load`."""
    strange = [n for n in graph.nodes if n.op not in HANDLERS and n.op not in FOLDED]
    if strange:
        named = ", ".join(f"{n.op} (node {n.name})" for n in strange[:3])
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise UnsupportedModel(f"The network has operators that are not run: {named}{more}.")
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise UnsupportedModel(
            f"The network has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs; one of"
            " each is run."
        )
    return _Import(graph).net()


class _Import:
    def __init__(self, graph: OnnxGraph) -> None:
        self.graph = graph
        ((name, dims),) = graph.inputs.items()
        given = [*dims, 0, 0, 0, 0][:4]
        if dims and (len(dims) != 4 or given[0] > 1):
            raise UnsupportedModel(f"The network's input has the shape {dims}.")
        channels = given[1] or self._channels(name)
        shape = (1, channels, given[2] or PROBE[0], given[3] or PROBE[1])
        if max(shape) > 1 << 16:
            raise UnsupportedModel(f"The network's input has the shape {dims}.")
        self.draft = Draft(Builder(channels), graph.opset)
        self.known: dict[str, Known] = dict(graph.constants)
        self.known[name] = Maps(INPUT, shape)
        self.folded = 0  # elements of constants that were computed

    def _channels(self, name: str) -> int:
        """The input's channels as the first convolution says them."""
        for node in self.graph.nodes:
            if node.op == "Conv" and node.inputs[:1] == (name,) and len(node.inputs) > 1:
                w = self.graph.constants.get(node.inputs[1])
                if w is not None and w.ndim == 4:
                    return int(w.shape[1])
        return 3

    def net(self) -> Net:
        wanted = self.graph.outputs[0]
        for node in self.graph.nodes:
            if not node.outputs:
                raise BadModel(f"The node {node.name} has no output.")
            found = self._node(node, wanted)
            for name, value in zip(node.outputs, found, strict=False):
                self.known[name] = value
        output = self.known.get(wanted)
        if not isinstance(output, Maps):
            raise BadModel("The network's output is not made by its nodes.")
        return self.draft.b.finish(output.name)

    def _node(self, node: OnnxNode, wanted: str) -> list[Known]:
        given = [self._input(node, name) for name in node.inputs]
        constants = [v for v in given if isinstance(v, np.ndarray) or v is None]
        if node.op in FOLDED and len(constants) == len(given):
            return [self._folded(node, constants)]
        if node.op == "Shape" and isinstance(given[0], Maps | View):
            return [np.array(given[0].shape, np.int64)]
        handler = HANDLERS.get(node.op)
        if handler is None or not given:
            raise unsupported(node.op, node.name)
        if node.op == "Clip" and node.outputs[0] != wanted:
            raise unsupported(node.op, node.name, "limits in the middle of the network")
        try:
            return handler(self.draft, node, given)
        except (TypeError, ValueError, AttributeError, IndexError, OverflowError):
            # Attributes of another type than the operator has.
            raise BadModel(f"The node {node.name} ({node.op}) makes no sense.") from None

    def _input(self, node: OnnxNode, name: str) -> Known | None:
        if not name:
            return None
        value = self.known.get(name)
        if value is None:
            raise BadModel(f"The node {node.name} reads {name!r}, which nothing writes before.")
        return value

    def _folded(self, node: OnnxNode, given: list[Array | None]) -> Array:
        try:
            self.folded += size(node.op, [v for v in given if v is not None])
            if self.folded > MAXFOLDED:
                raise UnsupportedModel(f"The constants up to the node {node.name} are too large.")
            with np.errstate(all="ignore"):
                return np.asarray(FOLDED[node.op](node.attrs, *given))
        except (ValueError, IndexError, TypeError, KeyError, OverflowError, MemoryError):
            raise BadModel(f"The node {node.name} ({node.op}) makes no sense.") from None
