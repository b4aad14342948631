# SPDX-License-Identifier: Apache-2.0
"""Graph -> Program of one token each of several sessions.

A lane is a session. What reads weights runs once for all lanes, as for the rows of a prompt; what
reads a KV cache runs once a lane, with the lane's own parameter words (`params` at 256 * (lane +
1): n_tokens 1, pos0), over its row of each activation. The caches `kc.N@lane`, `vc.N@lane` are
buffers of the sessions' own executables, lent. One sequence, `batch`: ids in, `topk` records of
RECORD_STRIDE bytes a lane out.

Several tokens of one session are lowered in the same way: with logits and a record after each, each
attending by itself, so that a CPU computes what it computes for single tokens to the last digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.backends.base import DeviceInfo
from engine.graph import Graph, Node
from engine.lower import Lowering
from engine.program import Binding, Buffer, Kind, Program
from engine.variants import Allow, allow_all
from kernels import kv
from kernels.topk.op import RECORD_WORDS

ALIGN = 256  # of what a binding may begin at
RECORD_STRIDE = -(-RECORD_WORDS * 4 // ALIGN) * ALIGN

_BY_LANE = ("rope_kv", "attention_decode", "softcap", "topk")
_BY_ROW = ("attention_decode", "softcap", "topk")


class NoBatch(ValueError):
    """The rows of this model's activations cannot be bound one by one."""


def params_at(lane: int) -> int:
    """Where a lane's parameter words lie in `params`; those of all lanes at once are at 0."""
    return ALIGN * (lane + 1)


def lower_batch(
    graph: Graph,
    device: DeviceInfo,
    contexts: Sequence[int],
    allow: Allow = allow_all,
    forms: Sequence[str] = (),
) -> Program:
    """A program for one token of each session; `contexts` are the tokens that their caches hold,
    `forms` those of the caches (none given: f16).

    Raises:
        NoBatch, OutOfMemory, BadModel
    """
    return _Batch(graph, device, contexts, allow, forms or ["f16"] * len(contexts)).program()


def lower_rows(
    graph: Graph,
    device: DeviceInfo,
    context: int,
    sizes: Sequence[int],
    allow: Allow = allow_all,
    kv: str = "f16",
) -> Program:
    """A program for several tokens of one session, each of which has logits and a record of `topk`:
    a sequence `rowsN` for each of the sizes, for at most N.

    Raises:
        NoBatch, OutOfMemory, BadModel
    """
    return _Rows(graph, device, context, sizes, allow, kv).program()


def _padded(width: int) -> int:
    """Logits of a vocabulary, so that each lane's can be bound."""
    return -(-width * 4 // ALIGN) * ALIGN // 4


class _Batch(Lowering):
    _apart: tuple[str, ...] = _BY_LANE  # operations with a call for each lane

    def __init__(
        self,
        graph: Graph,
        device: DeviceInfo,
        contexts: Sequence[int],
        allow: Allow,
        forms: Sequence[str],
    ) -> None:
        super().__init__(graph, device, max(contexts), len(contexts), allow)
        self._contexts, self._forms = contexts, forms
        self._rows: dict[str, int] = {}  # bytes of a lane's row of a buffer
        self._ldy = 0
        self._turned: Node | None = None  # the node whose calls are made

    def program(self) -> Program:
        whole = super().program()
        calls = whole.sequences["prefill"] + whole.sequences["head"]
        used = {b.buffer for c in calls for b in c.bindings} | {"params"}
        buffers = {name: b for name, b in whole.buffers.items() if name in used}
        return Program(buffers, {"batch": calls}, {**whole.meta, "lanes": len(self._contexts)})

    def _buffer(self, name: str, nbytes: int, kind: Kind) -> str:
        if name == "params":
            nbytes = params_at(len(self._contexts))
        elif name == "topk":
            self._rows[name] = RECORD_STRIDE
            nbytes = RECORD_STRIDE * len(self._contexts)
        return super()._buffer(name, nbytes, kind)

    def _scratch(self, name: str, width: int, rows: int | None = None) -> str:
        width = _padded(width) if name == "logits" else width
        self._rows[name] = 4 * width
        return super()._scratch(name, width)

    def _alone(self, node: Node) -> bool:
        return False

    def _last_layer(self) -> None:
        return None  # each row has logits

    def _likeliest(self, logits: Binding, out: Binding, v: int) -> None:
        pass  # of no lane

    def _linear(self, node: Node) -> None:
        n = node.int("n")
        self._ldy = _padded(n) if self._in_head else n
        super()._linear(node)

    def _rope_kv(self, node: Node) -> None:
        self._turned = node
        super()._rope_kv(node)

    def _call(
        self, op: str, bindings: list[Binding], fmt: str | None, only: str, push: dict[str, float]
    ) -> None:
        if op == "attention_prefill" or (op == "matvec" and only == "decode"):
            return  # its twin does it
        if op == "matvec":
            op, push = "matmul", {**push, "ldy": self._ldy}
        if op == "rmsnorm":
            push = {**push, "last": 0}
        sequence = "head" if self._in_head else "prefill"
        if op not in self._apart:
            self._builder.call(op, bindings, fmt, push, sequence, len(self._contexts))
            return
        for lane, context in enumerate(self._contexts):
            own = {**push, "ctx": context} if "ctx" in push else push
            at = [self._lane(b, lane, own) for b in bindings]
            if op == "rope_kv" and self._turned is not None:
                at[1] = self._table(self._turned, context)
            form = self._forms[lane] if fmt else None  # those with a form have that of the caches
            self._builder.call(op, at, form, own, sequence, 1, params_at(lane))

    def _lane(self, binding: Binding, lane: int, push: Mapping[str, float]) -> Binding:
        """What a lane has of a binding of a single session's program."""
        buffer = self._builder.buffers[binding.buffer]
        if buffer.kind == "weight":
            return binding
        row = self._rows.get(buffer.name)
        if row is not None:
            if row % ALIGN:
                raise NoBatch(f"a row of {buffer.name} has {row} bytes")
            return Binding(buffer.name, row * lane, row)
        # A cache, or a work area of one lane's call.
        name = f"{buffer.name}@{lane}"
        nbytes = buffer.nbytes
        if buffer.kind == "state":
            rows = int(push["kv_heads"]), int(push["ctx"]), int(push["dim"])
            nbytes = kv.nbytes(self._forms[lane], *rows)
        self._builder.buffers.setdefault(name, Buffer(name, nbytes, buffer.kind))
        return Binding(name, binding.offset, binding.nbytes)


class _Rows(_Batch):
    _apart = _BY_ROW

    def __init__(
        self,
        graph: Graph,
        device: DeviceInfo,
        context: int,
        sizes: Sequence[int],
        allow: Allow,
        kv: str,
    ) -> None:
        super().__init__(graph, device, [context] * max(sizes), allow, [kv] * max(sizes))
        self._kv, self._sizes_of = kv, sizes

    def program(self) -> Program:
        whole = super().program()
        calls = whole.sequences["batch"]
        sequences = {
            f"rows{size}": tuple(c for c in calls if c.params <= params_at(size - 1))
            for size in self._sizes_of
        }
        return Program(whole.buffers, sequences, whole.meta)

    def _lane(self, binding: Binding, lane: int, push: Mapping[str, float]) -> Binding:
        if self._builder.buffers[binding.buffer].kind == "state":
            return binding  # all rows are of one session
        return super()._lane(binding, lane, push)
