# SPDX-License-Identifier: Apache-2.0
"""Where a text program's calls and buffers are written as its graph is lowered (lower.py)."""

from __future__ import annotations

from engine.backends.base import DeviceInfo
from engine.builder import ProgramBuilder
from engine.graph import Graph, Node, Weight
from engine.program import Binding, Kind
from engine.variants import Allow


class Calls:
    """The sequences so far, and in which buffer each value of the graph is."""

    def __init__(
        self, graph: Graph, device: DeviceInfo, context: int, chunk: int, allow: Allow
    ) -> None:
        self._graph = graph
        self._device = device
        self._context = context
        self._chunk = chunk
        self._allow = allow
        self._builder = ProgramBuilder(device, context, allow)
        self._where: dict[str, str] = {}  # value -> buffer
        self._in_head = False
        self._of_all: tuple[str, ...] = ("prefill",)  # the sequences for all rows of a prompt

    def _buffer(self, name: str, nbytes: int, kind: Kind) -> str:
        return self._builder.buffer(name, nbytes, kind)

    def _scratch(self, name: str, width: int, rows: int | None = None) -> str:
        return self._buffer(name, (rows or self._chunk) * width * 4, "scratch")

    def _call(
        self, op: str, bindings: list[Binding], fmt: str | None, only: str, push: dict[str, float]
    ) -> None:
        """Adds a call to both `decode` and `prefill` (or what follows it), or to `head`."""
        rows = self._of_all
        if only == "prefill":
            sequences = rows
        else:
            sequences = (only,) if only else ("head",) if self._in_head else ("decode", *rows)
        for sequence in sequences:
            tokens = self._chunk if sequence in rows else 1
            self._builder.call(op, bindings, fmt, push, sequence, tokens)

    def _in(self, node: Node, i: int = 0) -> Binding:
        return Binding(self._where[node.inputs[i]])

    def _out(self, node: Node, buffer: str) -> Binding:
        self._where[node.output] = buffer
        return Binding(buffer)

    def _weight(self, node: Node, i: int = 0) -> Weight:
        return self._graph.weights[node.weights[i]]
