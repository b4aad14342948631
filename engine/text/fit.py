# SPDX-License-Identifier: Apache-2.0
"""How a text model fits a device, before anything is loaded there."""

from __future__ import annotations

from dataclasses import dataclass

from engine.backends.base import DeviceInfo
from engine.cost import cost
from engine.errors import OutOfMemory
from engine.graph import Graph
from engine.lower import lower
from engine.program import Program
from engine.variants import Allow, allow_all

CONTEXT, CHUNK = 4096, 128  # of a session, unless others are asked for


@dataclass(frozen=True)
class Fit:
    """What a session takes: kernel calls a token, tokens of a prompt in a slice, bytes, and bytes
    that move for a token.
    """

    calls: int
    chunk: int
    context: int
    weights: int
    caches: int
    work: int
    moved: int


def fitting(
    graph: Graph,
    device: DeviceInfo,
    context: int,
    chunk: int,
    allow: Allow = allow_all,
    kv: str = "f16",
) -> Program:
    """The program with the longest chunk, of at most `chunk` tokens, whose scratch the device can
    bind.

    Raises:
        OutOfMemory: one token's would be too large, or something else is.
        BadModel: no kernel fits.
    """
    while True:
        try:
            return lower(graph, device, context, chunk, allow, kv)
        except OutOfMemory:
            if chunk == 1:
                raise
            chunk //= 2


def fit(graph: Graph, device: DeviceInfo) -> Fit:
    """How a session of CONTEXT tokens (or what the model can do) fits.

    Raises:
        OutOfMemory, BadModel: it does not.
    """
    context = min(int(graph.attrs["context"]), CONTEXT)
    program = fitting(graph, device, context, min(CHUNK, context))
    weights, caches = (
        sum(b.nbytes for b in program.buffers.values() if b.kind == kind)
        for kind in ("weight", "state")
    )
    return Fit(
        calls=len(program.sequences["decode"]) + len(program.sequences["head"]),
        chunk=int(program.meta["chunk"]),
        context=context,
        weights=weights,
        caches=caches,
        work=sum(b.nbytes for b in program.buffers.values()) - weights - caches,
        moved=cost(graph).nbytes,
    )
