# SPDX-License-Identifier: Apache-2.0
"""What of a model's last layer is needed for all rows of a prompt: the keys and values that the
caches keep. All else is for the last row, from which the head computes its logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.graph import Graph, Node

_ON_THE_WAY = ("rope_kv", "qk_norm", "bias", "linear", "rms_norm")  # from the store to the stream


@dataclass(frozen=True)
class LastLayer:
    """`stream`: the one value that the layer reads; its `width`; `way`: the names of the nodes from
    there to the store into the caches, in order; `product`: that of query, keys and values, of
    which `queries` rows are the query's.
    """

    stream: str
    width: int
    way: tuple[str, ...]
    product: str
    queries: int


def last_layer(graph: Graph) -> LastLayer | None:
    """The last layer of a graph as the passes leave it; None where it has not this form."""
    stores = [i for i, node in enumerate(graph.nodes) if node.op == "rope_kv"]
    if not stores:
        return None
    made, users = graph.producers(), graph.users()
    store = node = graph.nodes[stores[-1]]
    way: list[Node] = []
    for op in _ON_THE_WAY:
        if node.op == op and len(node.inputs) == 1 and (not way or len(users[node.output]) == 1):
            way.insert(0, node)
            node = made.get(node.inputs[0], node)
    begin = stores[-1] + 1 - len(way)
    products = [node for node in way if node.op == "linear"]
    before = {node.output for node in graph.nodes[:begin]}
    read = before & {value for node in graph.nodes[begin:] for value in node.inputs}
    if len(products) != 1 or tuple(way) != graph.nodes[begin : stores[-1] + 1] or len(read) != 1:
        return None
    queries = store.int("heads") * store.int("dim")
    names = tuple(node.name for node in way)
    return LastLayer(read.pop(), way[0].int("k"), names, products[0].name, queries)
