# SPDX-License-Identifier: Apache-2.0
"""Graph + what a device allows -> Program.

Buffers of a text program: `params`, `ids` (input, u32 for each token of a chunk), scratch for x, h,
qkv, a, gate_up, f and more, `logits` and `part`, `kc.N`/`vc.N` (state) for each layer, `topk`
(output) and one buffer for each weight. Sequences: `decode` (one token), `prefill` (up to `chunk`
tokens, up to the keys and values of the last layer), behind it `tail` (that layer for the last of
them, in row 0, with the parameters at TAIL_PARAMS: the slice of that token alone) or `rest` (for
all), `head` (the last row's norm, logits and topk), `likeliest` (head with the best of topk
alone), where there is a kernel for it `advance` (behind `decode` and one of both: the likeliest id
is the next one, its record is kept in `records`), and `ahead` (`decode`, `likeliest`, `advance`).
A program without `tail` has all of the last layer in `prefill`. Scratch is not shared by lifetime:
one buffer, one purpose.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from engine.backends.base import DeviceInfo
from engine.errors import BadModel
from engine.graph import Graph, Node
from engine.lower_calls import Calls
from engine.program import Binding, Buffer, Program
from engine.shards import expert_shards, matrix_shards, weight_nbytes
from engine.tail import LastLayer, last_layer
from engine.variants import Allow, NoKernel, allow_all, choose
from kernels import kv as caches
from kernels import op as contract_of
from kernels import weights as packing
from kernels.advance import op as advance
from kernels.attention_step import op as attention_step
from kernels.best.op import part_nbytes as best_part_nbytes
from kernels.contract import PARAM_WORDS
from kernels.swiglu.op import ACTS
from kernels.topk.op import RECORD_WORDS, part_nbytes

TAIL_PARAMS = 256  # bytes: where the parameters of `tail` lie


def lower(
    graph: Graph,
    device: DeviceInfo,
    context: int,
    chunk: int,
    allow: Allow = allow_all,
    kv: str = "f16",
) -> Program:
    """A program for sessions of `context` tokens that takes prompts in chunks of at most `chunk`
    tokens. `kv` is the form of the caches (kernels.kv.FORMATS).

    Raises:
        OutOfMemory: a buffer would be larger than the device can bind.
        BadModel: the graph has operations that only other passes' results have, or no kernel fits.
    """
    if chunk < 1 or not 1 <= context <= int(graph.attrs["context"]):
        raise ValueError(f"context {context}, chunk {chunk}")
    return Lowering(graph, device, context, chunk, allow, kv).program()


class Lowering(Calls):
    """The calls of each operation of a graph."""

    def __init__(
        self,
        graph: Graph,
        device: DeviceInfo,
        context: int,
        chunk: int,
        allow: Allow,
        kv: str = "f16",
    ) -> None:
        super().__init__(graph, device, context, chunk, allow)
        self._kv = kv
        self._users = graph.users()
        self._inner: dict[str, Node] = {}  # values that products compute themselves, for one token
        self._attended: dict[str, str] = {}  # where one token's attentions are, if not in `_where`
        self._gated: set[str] = set()  # gates and units that their product makes one, likewise
        self._last = self._last_layer()

    def program(self) -> Program:
        self._buffer("params", TAIL_PARAMS + PARAM_WORDS * 4, "params")
        self._where["ids"] = self._buffer("ids", self._chunk * 4, "input")
        for w in self._graph.weights.values():
            # A weight may be larger than a binding; it is bound in shards.
            self._builder.buffers[w.name] = Buffer(w.name, weight_nbytes(w), "weight")
        emit = {
            "lookup": self._lookup, "rms_norm": self._rms_norm, "linear": self._linear,
            "bias": self._bias, "qk_norm": self._qk_norm, "rope_kv": self._rope_kv,
            "attend": self._attend, "swiglu": self._swiglu, "route": self._route,
            "expert_linear": self._expert_linear, "expert_sum": self._expert_sum,
            "row_gate": self._row_gate, "softcap": self._softcap, "topk": self._topk,
        }  # fmt: skip
        if left := {n.op for n in self._graph.nodes} - set(emit):
            raise BadModel(f"The graph's {min(left)} was not fused; no kernel does it alone.")
        way = self._last.way if self._last else ()
        for node in self._graph.nodes:
            if node.name in way:
                self._of_all = ("prefill", "rest")
            elif self._of_all != ("prefill",):
                self._of_all = ("rest",)
            emit[node.op](node)
        if self._last:
            self._tail(self._last)
        meta: dict[str, int | str] = {
            "chunk": self._chunk, "context": self._context, "kv": self._kv,
            "vocab": int(self._graph.attrs["vocab"]),
        }  # fmt: skip
        calls = self._builder.calls
        if {"likeliest", "advance"} <= calls.keys():
            # One recording for each token: between two a device waits longer than between calls.
            names = ("decode", "likeliest", "advance")
            calls["ahead"] = [call for name in names for call in calls[name]]
        return self._builder.program(meta)

    def _last_layer(self) -> LastLayer | None:
        """The layer of which a prompt needs little, where there is a kernel for that."""
        with suppress(NoKernel):
            choose(contract_of("last_to_first"), self._device, None, self._allow)
            return last_layer(self._graph)
        return None

    def _tail(self, layer: LastLayer) -> None:
        """The calls of `rest` for the last token, which then gets the same digits."""
        stream = [Binding(self._where[layer.stream])]
        self._builder.call("last_to_first", stream, None, {"n": layer.width}, "tail", 1)
        rest = self._builder.calls["rest"]
        self._builder.calls["tail"] += [replace(call, params=TAIL_PARAMS) for call in rest]

    # One method an operation of the graph.

    def _lookup(self, node: Node) -> None:
        k = node.int("k")
        out = self._out(node, self._scratch("x", k))
        table, scale = self._weight(node), float(node.attrs.get("scale", 1.0))
        for binding, row, rows in matrix_shards(table, self._device.limits):
            bindings = [self._in(node), binding, out]
            push: dict[str, float] = {"k": k, "row0": row, "rows": rows, "scale": scale}
            self._call("embed", bindings, table.format, "", push)

    def _rms_norm(self, node: Node) -> None:
        k, last = node.int("k"), bool(node.attrs["last"])
        x, add = self._in(node), len(node.inputs) == 2
        # From the last row's norm on, everything is the head, which runs once a prompt.
        self._in_head = self._in_head or last
        inside = self._inside(node, "matvec_norm")
        if inside and last:
            return
        if add:
            y = self._out(node, self._where[node.inputs[1]])
        else:
            y = self._out(node, self._scratch("last" if last else "h", k, 1 if last else None))
        bindings = [x, Binding(node.weights[0]), y]
        push = {"k": k, "eps": float(node.attrs["eps"]), "last": int(last), "add": int(add)}
        self._call("rmsnorm", bindings, None, "prefill" if inside else "", push)

    def _alone(self, node: Node) -> bool:
        """Whether a pass has marked a node, and the device has its sequences for one token: a GPU,
        where a launch costs more than to compute something several times.
        """
        marked = bool(node.attrs.get("inside"))
        return marked and self._device.kind == "gpu" and not self._device.software

    def _inside(self, node: Node, op: str) -> bool:
        """Whether the products that read a node compute it themselves, as `op`, for one token."""
        if not self._alone(node):
            return False
        weights = {w for n in self._users[node.output] for w in n.weights}
        try:
            for fmt in {self._graph.weights[w].format for w in weights}:
                choose(contract_of(op), self._device, fmt, self._allow)
        except NoKernel:
            return False
        self._inner[node.output] = node
        return True

    def _multiplied(self, node: Node) -> tuple[str, list[Binding], dict[str, float]]:
        """How a product of one token gets what it multiplies: its operation, the bindings between
        matrix and result, more push constants.
        """
        made = self._inner.get(node.inputs[0])
        if made is None:
            value = node.inputs[0]
            return "matvec", [Binding(self._attended.get(value, self._where[value]))], {}
        if made.op == "rms_norm":
            norm = Binding(made.weights[0])
            return "matvec_norm", [self._in(made), norm], {"eps": float(made.attrs["eps"])}
        return "matvec_glu", [self._in(made)], {"act": ACTS[str(made.attrs["act"])]}

    def _linear(self, node: Node) -> None:
        n, k = node.int("n"), node.int("k")
        accumulate = len(node.inputs) == 2
        op, vectors, more = self._multiplied(node)
        gated = self._gates(node)
        if accumulate:
            out = self._out(node, self._where[node.inputs[1]])
        elif self._in_head:
            out = self._out(node, self._scratch("logits", n, 1))
        else:
            name = node.name.rpartition(".")[2]
            out = self._out(node, self._scratch(name, n))
        # Of a prompt's last layer the query is for `rest` alone.
        last = self._last
        queries = last.queries if last and last.product == node.name else 0
        y0 = 0
        for i in range(len(node.weights)):
            w = self._weight(node, i)
            if w.shape[1] != k:
                raise BadModel(f"The graph's node {node.name} has a matrix of the wrong width.")
            push: dict[str, float] = {"k": k, "accumulate": int(accumulate)}
            if not gated:
                only = "head" if self._in_head else "decode"
                for binding, row, rows in matrix_shards(w, self._device.limits):
                    own = {**push, **more, "n": rows, "y0": y0 + row}
                    self._call(op, [binding, *vectors, out], w.format, only, own)
            if not self._in_head:
                bindings = [self._in(node), out]
                for binding, row, rows in matrix_shards(w, self._device.limits, queries - y0):
                    only = "rest" if y0 + row + rows <= queries else "prefill"
                    own = {**push, "n": rows, "y0": y0 + row, "ldy": n}
                    self._call("matmul", [binding, *bindings], w.format, only, own)
            y0 += w.shape[0]
        if y0 != n:
            raise BadModel(f"The graph's node {node.name} has {y0} rows, not {n}.")

    def _gates(self, node: Node) -> bool:
        """Whether a product of gate and unit makes one of both itself, for one token."""
        users, w = self._users[node.output], self._weight(node)
        norm = self._inner.get(node.inputs[0])
        glu = users[0] if len(users) == 1 else node
        if norm is None or norm.op != "rms_norm" or glu.op != "swiglu" or len(node.weights) > 1:
            return False
        f, up = glu.int("f"), node.int("n") // 2
        whole = len(list(matrix_shards(w, self._device.limits))) == 1
        if not glu.attrs.get("inside") or not whole or f != up or up % packing.ROWS:
            return False
        bindings = [Binding(w.name), self._in(norm), Binding(norm.weights[0])]
        bindings.append(Binding(self._scratch("f", f)))
        push = {"n": f, "k": node.int("k"), "accumulate": 0, "y0": 0, "up": up}
        more = {"eps": float(norm.attrs["eps"]), "act": ACTS[str(glu.attrs["act"])]}
        try:
            self._call("matvec_norm_glu", bindings, w.format, "decode", {**push, **more})
        except NoKernel:
            return False
        self._gated.add(node.output)
        return True

    def _bias(self, node: Node) -> None:
        y = self._out(node, self._where[node.inputs[0]])
        self._call("add_bias", [Binding(node.weights[0]), y], None, "", {"n": node.int("n")})

    def _qk_norm(self, node: Node) -> None:
        qkv = self._out(node, self._where[node.inputs[0]])
        push: dict[str, float] = {name: node.int(name) for name in ("heads", "kv_heads", "dim")}
        push |= {"eps": float(node.attrs["eps"]), "whole": int(bool(node.attrs["whole"]))}
        self._call("head_norm", [Binding(node.weights[0]), qkv], None, "", push)

    def _sizes(self, node: Node) -> dict[str, float]:
        sizes: dict[str, float] = {name: node.int(name) for name in ("heads", "kv_heads", "dim")}
        return {**sizes, "ctx": self._context}

    def _caches(self, node: Node) -> list[Binding]:
        nbytes = caches.nbytes(self._kv, node.int("kv_heads"), self._context, node.int("dim"))
        names = [f"{name}.{node.int('layer')}" for name in ("kc", "vc")]
        for name in names:
            if self._device.features >= caches.ADDRESS:
                self._builder.buffers[name] = Buffer(name, nbytes, "state")  # however large it is
            else:
                self._buffer(name, nbytes, "state")
        return [Binding(name) for name in names]

    def _table(self, node: Node, context: int) -> Binding:
        """The positions of a session in its rotary table, which is as long as the model's longest
        context. Some models have one of their own for long contexts.
        """
        long = len(node.weights) > 1 and context > node.int("short_context")
        return Binding(node.weights[int(long)], 0, context * node.int("rope_dims") * 4)

    def _rope_kv(self, node: Node) -> None:
        qkv = self._out(node, self._where[node.inputs[0]])
        neox = int(bool(node.attrs["neox"]))
        bindings = [qkv, self._table(node, self._context), *self._caches(node)]
        rope_dims = node.int("rope_dims")
        push = {**self._sizes(node), "rope_dims": rope_dims, "neox": neox}
        only = "prefill" if self._steps(node, bindings, push) else ""
        self._call("rope_kv", bindings, self._kv, only, push)

    def _steps(self, node: Node, bindings: list[Binding], push: dict[str, float]) -> bool:
        """Whether a rotation and its attention are one call for one token, as `_inside`."""
        fits = attention_step.fits(node.int("dim"), node.int("rope_dims")) and self._kv == "f16"
        if not fits or not self._alone(node):
            return False
        attend = self._users[node.output][0]
        try:
            self._call(
                "attention_step", bindings, self._kv, "decode", {**push, **self._scoring(attend)}
            )
        except NoKernel:
            return False
        self._attended[attend.output] = bindings[0].buffer
        return True

    def _attend(self, node: Node) -> None:
        sizes = self._sizes(node)
        out = self._out(node, self._scratch("a", node.int("heads") * node.int("dim")))
        bindings = [self._in(node), *self._caches(node), out]
        push = {**sizes, **self._scoring(node)}
        if node.output not in self._attended:
            self._call("attention_decode", bindings, self._kv, "decode", push)
        self._call("attention_prefill", bindings, self._kv, "prefill", push)

    def _scoring(self, node: Node) -> dict[str, float]:
        """What an attention makes of its scores."""
        scale, cap = float(node.attrs["scale"]), float(node.attrs["softcap"])
        return {"scale": scale, "window": node.int("window"), "softcap": cap}

    def _swiglu(self, node: Node) -> None:
        f, each = node.int("f"), node.int("each")
        out = self._out(node, self._scratch("f", f * each))
        push: dict[str, float] = {"f": f, "act": ACTS[str(node.attrs["act"])], "each": each}
        made = node.inputs[0] in self._gated or self._inside(node, "matvec_glu")
        only = "prefill" if made else ""
        self._call("swiglu", [self._in(node), out], None, only, push)

    def _route(self, node: Node) -> None:
        used = node.int("used")
        out = self._out(node, self._scratch("route", 2 * used))
        push: dict[str, float] = {"experts": node.int("experts"), "used": used}
        push["norm"] = int(bool(node.attrs["norm"]))
        self._call("route", [self._in(node), out], None, "", push)

    def _expert_linear(self, node: Node) -> None:
        n, used = node.int("n"), node.int("used")
        y = self._out(node, self._scratch(node.name.rpartition(".")[2], n * used))
        each = n // len(node.weights)
        for i in range(len(node.weights)):
            push: dict[str, float] = {"n": each, "sum": 0, "y0": i * each, "ldy": n}
            self._experts(node, i, y, push)

    def _expert_sum(self, node: Node) -> None:
        if len(node.inputs) != 3:
            raise BadModel(f"The graph's {node.name} was not fused with a sum.")
        n = node.int("n")
        y = self._out(node, self._where[node.inputs[2]])
        self._experts(node, 0, y, {"n": n, "sum": 1, "y0": 0, "ldy": n})

    def _row_gate(self, node: Node) -> None:
        y = self._out(node, self._where[node.inputs[0]])
        self._call("row_gate", [self._in(node, 1), y], None, "", {"n": node.int("n")})

    def _experts(self, node: Node, i: int, y: Binding, push: dict[str, float]) -> None:
        """The experts' products, a call for each shard."""
        w, n = self._weight(node, i), int(push["n"])
        count = node.int("experts")
        if w.shape != (count * n, node.int("k")) or n % packing.ROWS:
            raise BadModel(f"The graph's node {node.name} has a matrix of the wrong shape.")
        for binding, first, held in expert_shards(w, count, self._device.limits):
            bindings = [binding, self._in(node), self._in(node, 1), y]
            more = {**push, "k": w.shape[1], "first": first, "count": held}
            self._call("experts", bindings, w.format, "", {**more, "used": node.int("used")})

    def _softcap(self, node: Node) -> None:
        x = self._out(node, self._where[node.inputs[0]])
        push: dict[str, float] = {"n": node.int("v"), "cap": float(node.attrs["cap"])}
        self._call("softcap", [x], None, "", push)

    def _topk(self, node: Node) -> None:
        v = node.int("v")
        part = Binding(self._buffer("part", part_nbytes(v), "scratch"))
        out = self._out(node, self._buffer("topk", RECORD_WORDS * 4, "output"))
        self._likeliest(self._in(node), out, v)
        for stage in (0, 1):
            self._call("topk", [self._in(node), part, out], None, "", {"v": v, "stage": stage})
        kept = 4 * advance.STRIDE * advance.MOST
        if kept > self._device.limits.max_storage_range:
            return  # each token is a slice
        records = Binding(self._buffer("records", kept, "output"))
        params = Binding("params", 0, 4 * PARAM_WORDS)
        with suppress(NoKernel):  # the same
            bindings = [out, params, Binding("ids"), records]
            self._builder.call("advance", bindings, None, {}, "advance", 1)

    def _likeliest(self, logits: Binding, out: Binding, v: int) -> None:
        """The head again, for whoever wants the likeliest token alone."""
        part = Binding(self._buffer("best_part", best_part_nbytes(v), "scratch"))
        try:
            for stage in (0, 1):
                push: dict[str, float] = {"v": v, "stage": stage}
                self._builder.call("best", [logits, part, out], None, push, "likeliest", 1)
        except NoKernel:
            self._builder.calls.pop("likeliest", None)
            return
        self._builder.calls["likeliest"][:0] = self._builder.calls["head"]
