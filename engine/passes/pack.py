# SPDX-License-Identifier: Apache-2.0
"""Layout: which internal format each matrix gets, and which matrices become one.

Every source type has one internal format (engine/importers/ggml.py); floats become what the graph's
attribute `weights` says, if it says something. The attribute `narrow` makes q4 of all matrices but
those at the ends (q8 at most) and those that choose experts, which cost little and matter much.
Matrices of one product that share a format are laid under each other, as long as each but the last
fills its tiles of 16 rows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from engine.graph import Graph, Node, Weight, changed
from engine.importers import ggml
from kernels.weights import ROWS

TILE = "tile16"


def pack(graph: Graph) -> Graph:
    """Decides `format` and `layout` of each matrix."""
    wished = str(graph.attrs.get("weights", ""))
    narrow = _narrow(graph) if graph.attrs.get("narrow") else {}
    formatted = {
        w.name: w
        if w.format
        else replace(w, format=narrow.get(w.name) or _format(w, wished), layout=TILE)
        for w in graph.weights.values()
    }
    kept = {name: formatted[name] for node in graph.nodes for name in node.weights}
    counts = Counter(w.format for w in kept.values() if w.layout == TILE)
    formats = ", ".join(f"{count} {fmt}" for fmt, count in sorted(counts.items()))
    note = f"matrices in tiles of {ROWS} rows: {formats}"
    return changed(graph, "pack", note, graph.nodes, weights=kept)


def join(graph: Graph) -> Graph:
    """Lays the matrices of a fused product under each other."""
    nodes: list[Node] = []
    kept: dict[str, Weight] = {}
    joined = 0
    for node in graph.nodes:
        weights = [graph.weights[name] for name in node.weights]
        if node.op == "linear" and len(weights) > 1:
            groups = _join(node.name, weights)
            joined += len(weights) - len(groups)
            weights = groups
            node = replace(node, weights=tuple(w.name for w in weights))
        nodes.append(node)
        kept.update((w.name, w) for w in weights)
    return changed(graph, "join", f"{joined} matrices joined to another", nodes, weights=kept)


def _narrow(graph: Graph) -> dict[str, str]:
    """The narrow format of each matrix; those that stay as they are, are left out."""
    routed = {name for node in graph.nodes if node.op == "route" for name in node.inputs}
    routed |= {node.inputs[1] for node in graph.nodes if node.op == "row_gate"}
    left = {name for node in graph.nodes if node.output in routed for name in node.weights}
    out = {}
    for w in graph.weights.values():
        if w.format or w.name in left:
            continue
        own = ggml.TYPES[w.source].format
        if w.shape[0] != graph.attrs["vocab"]:
            out[w.name] = "q4"
        elif own == "f16":
            out[w.name] = "q8"
    return out


def narrowed(graph: Graph) -> bool:
    """Would `narrow` make other matrices of an unpacked graph's?"""
    formats = _narrow(graph)
    return any(
        ggml.TYPES[graph.weights[name].source].format != fmt for name, fmt in formats.items()
    )


def _format(w: Weight, wished: str) -> str:
    kind = ggml.TYPES[w.source]
    return wished if wished and kind.block == 1 else kind.format


def _join(name: str, weights: list[Weight]) -> list[Weight]:
    groups: list[Weight] = []
    for w in weights:
        last = groups[-1] if groups else None
        if last is not None and last.format == w.format and last.shape[0] % ROWS == 0:
            shape = (last.shape[0] + w.shape[0], w.shape[1])
            source = last.source if last.source == w.source else "mixed"
            groups[-1] = replace(last, shape=shape, source=source, parts=last.parts + w.parts)
        else:
            groups.append(replace(w, name=f"{name}.{len(groups)}"))
    return groups
