# SPDX-License-Identifier: Apache-2.0
"""Graph, passes and lowering: what each changes, and what it leaves alone."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.backends.base import DeviceInfo, Limits
from engine.backends.null import NullBackend
from engine.errors import BadModel, OutOfMemory
from engine.graph import Graph, Node, explain
from engine.importers.families import import_model
from engine.importers.gguf import Gguf
from engine.lower import lower
from engine.passes import PASSES, optimise
from engine.passes.fuse_add import fuse_add
from engine.passes.fuse_ffn import fuse_ffn
from engine.passes.fuse_qkv import fuse_qkv
from engine.shards import weight_nbytes
from engine.variants import allowed, choose
from kernels import op
from kernels.contract import Contract, Variant


def graph_of(path: Path) -> Graph:
    fd = os.open(path, os.O_RDONLY)
    graph = import_model(Gguf(fd)).graph
    os.close(fd)
    return graph


def device(**limits: int) -> DeviceInfo:
    return DeviceInfo("null", "null", "none", True, Limits(**limits))


def ops(graph: Graph) -> Counter[str]:
    return Counter(n.op for n in graph.nodes)


def test_passes_fuse_everything(tiny_q8: Path) -> None:
    graph = graph_of(tiny_q8)
    assert ops(graph)["linear"] == 2 * 7 + 1
    done = optimise(graph)
    assert ops(done) == {
        "lookup": 1, "rms_norm": 5, "linear": 9, "rope_kv": 2, "attend": 2, "swiglu": 2, "topk": 1
    }  # fmt: skip
    assert len(done.log) == len(PASSES)
    assert done.weights["l0.qkv.0"].shape == (64 + 32 + 32, 64)
    assert all(w.format for w in done.weights.values())
    table = explain(done)
    assert "fuse_qkv" in table
    assert all(len(line) < 120 for line in table.splitlines())
    assert Graph.from_json(json.loads(json.dumps(done.to_json()))) == done


def test_mixed_formats_stay_apart(tmp_path: Path, tiny: Any) -> None:
    shape = tiny.shape(kinds={"attn_k": "F16"})
    done = optimise(graph_of(tiny.write(tmp_path / "m.gguf", "Q8_0", shape)))
    node = next(n for n in done.nodes if n.name == "l0.qkv")
    assert [done.weights[w].format for w in node.weights] == ["q8", "f16", "q8"]
    program = lower(done, device(), 32, 4)
    pushes = [c for c in program.sequences["decode"] if c.bindings[0].buffer.startswith("l0.qkv.")]
    assert [op("matvec").unpack(c.push)["y0"] for c in pushes] == [0, 64, 96]


def test_a_value_that_is_read_twice_is_not_fused_away(tiny_q8: Path) -> None:
    graph = graph_of(tiny_q8)
    extra = Node("spy", "silu", ("l0.gate",), "spy")
    assert "l0.gate_up" not in {n.name for n in fuse_ffn(with_node(graph, extra)).nodes}
    extra = Node("spy", "silu", ("l0.k",), "spy")
    assert "l0.qkv" not in {n.name for n in fuse_qkv(with_node(graph, extra)).nodes}
    # The residual stream is read after the sum: the sum may not overwrite it.
    extra = Node("spy", "silu", ("x",), "spy")
    names = {n.name: n.op for n in fuse_add(with_node(graph, extra)).nodes}
    assert names["l0.x_attn"] == "add"
    assert "l0.x_ffn" not in names


def with_node(graph: Graph, node: Node) -> Graph:
    return replace(graph, nodes=(*graph.nodes, node)).check()


def test_a_graph_that_does_not_hold_together(tiny_q8: Path) -> None:
    graph = optimise(graph_of(tiny_q8))
    with pytest.raises(BadModel, match="too early"):
        replace(graph, nodes=graph.nodes[::-1]).check()
    with pytest.raises(BadModel, match="twice"):
        replace(graph, nodes=(*graph.nodes, graph.nodes[0])).check()
    with pytest.raises(BadModel, match="needs the weight"):
        replace(graph, weights={}).check()
    with pytest.raises(BadModel, match="unknown operation"):
        with_node(graph, Node("a", "fft", (), "a"))
    data = graph.to_json()
    for key in data:
        with pytest.raises(BadModel):
            Graph.from_json({**data, key: 7})


def test_lowering_wants_a_fused_graph(tiny_q8: Path) -> None:
    with pytest.raises(BadModel, match="was not fused"):
        lower(graph_of(tiny_q8), device(), 32, 4)


def test_program(tiny_q8: Path) -> None:
    graph = optimise(graph_of(tiny_q8))
    program = lower(graph, device(), 64, 8)
    assert set(program.sequences) == {
        "decode", "prefill", "tail", "rest", "head", "likeliest", "advance", "ahead"
    }  # fmt: skip
    kinds = Counter(b.kind for b in program.buffers.values())
    assert kinds["state"] == 4
    assert kinds["weight"] == len(graph.weights)
    assert program.buffers["kc.1"].nbytes == 2 * 64 * 16 * 2
    assert program.buffers["x"].nbytes == 8 * 64 * 4
    assert program.buffers["topk"].nbytes == 520
    assert [c.op for c in program.sequences["head"]] == ["rmsnorm", "matvec", "topk", "topk"]
    assert len(program.sequences["decode"]) == 1 + 2 * 9
    assert len(program.sequences["prefill"]) == 1 + 9 + 3  # up to the last rotation
    # The parameter buffer, bindings and push constants fit the baseline contract.
    for calls in program.sequences.values():
        for call in calls:
            assert len(call.bindings) <= 4
            assert len(call.push) <= 128
            assert max(call.groups) <= 65535


def test_limits(tiny_q8: Path) -> None:
    graph = optimise(graph_of(tiny_q8))
    program = lower(graph, device(max_storage_range=13 << 10), 64, 2)
    for calls in program.sequences.values():
        for call in calls:
            for b in call.bindings:
                if program.buffers[b.buffer].kind == "weight" and b.nbytes is not None:
                    assert b.nbytes <= 13 << 10
                    assert b.offset % 256 == 0
    embeds = [c for c in program.sequences["decode"] if c.op == "embed"]
    rows = [op("embed").unpack(c.push) for c in embeds]
    assert len(rows) > 1
    assert sum(r["rows"] for r in rows) == 300
    assert [r["row0"] for r in rows] == sorted({r["row0"] for r in rows})
    with pytest.raises(OutOfMemory, match="can bind"):
        lower(graph, device(max_storage_range=3 << 10), 96, 1)
    with pytest.raises(OutOfMemory, match="MiB at most"):
        lower(graph, device(max_storage_range=13 << 10), 96, 64)
    with pytest.raises(OutOfMemory, match="workgroups"):
        lower(graph, device(max_workgroup_count=(3, 3, 3)), 64, 16)


@pytest.mark.parametrize("most", [(65535,) * 3, (1024,) * 3, (4, 65535, 65535)])
def test_grids_of_any_length(
    tiny: Any, tmp_path: Path, most: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.importers.decoder.MAX_CONTEXT", 131072)
    shape = tiny.shape(vocab=1500, context=131072)
    path = tiny.write(tmp_path / "m.gguf", "Q8_0", shape)
    program = lower(optimise(graph_of(path)), device(max_workgroup_count=most), 131072, 131072)
    for calls in program.sequences.values():
        for call in calls:
            assert all(0 < g <= m for g, m in zip(call.groups, most, strict=True)), call
    by_token = {"embed": 1, "rmsnorm": 1, "rope_kv": 1, "attention_prefill": 1, "matmul": 4}
    for call in program.sequences["prefill"] + program.sequences["rest"]:
        x, y, z = call.groups
        groups = x * y * z if call.op == "rmsnorm" else y * z
        assert groups * by_token.get(call.op, 1) >= 131072


def test_choice_of_variants() -> None:
    def contract(*variants: Variant) -> Contract:
        return replace(op("matvec"), variants=variants)

    base = Variant("q4", (32, 1, 1))
    fast = Variant("q4_dot", (64, 1, 1), needs=frozenset({"dot"}), baseline=False)
    other = Variant("q8", (32, 1, 1))
    both = contract(base, fast, other)
    plain, able = device(), replace(device(), features=frozenset({"dot"}))

    class Measured(NullBackend):
        banned = ""

        def misfit(self, op: str, variant: str) -> str:
            return ""

        def doubt(self, op: str, variant: str) -> str:
            return "wrong" if variant == self.banned else ""

        def fastest(self, op: str, variants: Sequence[str], push: Any) -> str:
            return variants[-1]

    def name(info: DeviceInfo, fmt: str, banned: str = "") -> str:
        backend = Measured()
        backend.banned = banned
        assert choose(both, info, fmt, lambda o, v: v != banned, {}).name == fmt
        assert choose(both, info, fmt, allowed(backend)).name == fmt
        return choose(both, info, fmt, allowed(backend), {}).name

    assert name(plain, "q4") == "q4"
    assert name(able, "q4") == "q4_dot"
    assert name(able, "q4", "q4_dot") == "q4"
    assert name(able, "q8") == "q8"
    small = replace(able, limits=Limits(max_workgroup_invocations=32))
    assert name(small, "q4") == "q4"
    with pytest.raises(BadModel, match="no kernel for matvec q8"):
        choose(both, plain, "q8", lambda o, v: v != "q8")


def test_sizes_of_weights(tiny_q8: Path) -> None:
    graph = optimise(graph_of(tiny_q8))
    assert weight_nbytes(graph.weights["rope"]) == 96 * 16 * 4
    assert weight_nbytes(graph.weights["blk.0.attn_norm.weight"]) == 64 * 4
    assert weight_nbytes(graph.weights["token_embd.weight"]) == 19 * 2 * 144 * 4
