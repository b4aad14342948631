# SPDX-License-Identifier: Apache-2.0
"""Norms and gates inside the products that read them: fewer calls a token, the same logits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.base import DeviceInfo, Limits
from engine.graph import Graph, Node
from engine.importers.families import import_model
from engine.importers.gguf import Gguf
from engine.lower import lower
from engine.passes import optimise
from engine.passes.move_in import norm_into_matvec
from engine.text.model import State, TextModel
from engine.variants import Allow, NoKernel
from tests.engine.conftest import off_by

IDS = [5, 17, 260, 299, 3, 44, 44, 150, 1, 280, 99]
FORMATS = {"F16": "f16", "Q8_0": "q8", "Q4_1": "q4"}
GPU = DeviceInfo("gpu", "a GPU", "none", False, Limits())


def norm(name: str, x: str, y: str) -> Node:
    attrs = {"k": 32, "eps": 1e-5, "last": False}
    return Node(name, "rms_norm", (x,), y, (), attrs)


def product(name: str, inputs: tuple[str, ...], y: str) -> Node:
    return Node(name, "linear", inputs, y, (), {"n": 32, "k": 32})


def moved(*nodes: Node) -> list[str]:
    graph = norm_into_matvec(Graph((Node("x", "lookup", ("ids",), "x"), *nodes), {}))
    return [n.name for n in graph.nodes if n.attrs.get("inside")]


def test_what_can_move() -> None:
    assert moved(norm("n", "x", "h"), product("a", ("h",), "a"), product("b", ("h",), "b")) == ["n"]
    # Something else reads it, or nothing.
    assert (
        moved(norm("n", "x", "h"), product("a", ("h",), "a"), Node("s", "silu", ("h",), "s")) == []
    )
    assert moved(norm("n", "x", "h")) == []
    # The first product would be added to what the second still reads.
    first, second = product("a", ("h", "x"), "x1"), product("b", ("h",), "b")
    assert moved(norm("n", "x", "h"), first) == []
    assert moved(norm("n", "x", "h"), first, second) == []
    between = product("a", ("g", "x"), "x1")
    assert moved(norm("m", "x", "g"), norm("n", "x", "h"), between, second) == []
    # A norm that is added to the stream is none of these.
    added = replace(norm("n", "x", "h"), inputs=("x", "x"))
    assert moved(added, product("a", ("h",), "a")) == []


def test_calls_of_a_token(tiny_q8: Path) -> None:
    graph = compiled(tiny_q8)
    program = lower(graph, GPU, 64, 8)
    counts = {name: Counter(c.op for c in calls) for name, calls in program.sequences.items()}
    each = {"matvec_norm": 1, "attention_step": 1, "matvec": 2, "matvec_norm_glu": 1}
    assert counts["decode"] == {"embed": 1, **{op: 2 * n for op, n in each.items()}}
    assert counts["head"] == {"matvec_norm": 1, "topk": 2}
    rows = counts["prefill"] + counts["tail"]
    assert rows["rmsnorm"] == 4 + 1  # that of the last layer's keys and values in both
    assert rows["swiglu"] == 2
    for device in (replace(GPU, software=True), replace(GPU, kind="cpu")):
        ops = {c.op for c in lower(graph, device, 64, 8).sequences["decode"]}
        assert not {"matvec_norm", "matvec_glu", "matvec_norm_glu", "attention_step"} & ops

    def calls(*out: str, kv: str = "f16") -> Counter[str]:
        program = lower(graph, GPU, 64, 8, lambda op, variant: op not in out, kv)
        return Counter(c.op for c in program.sequences["decode"])

    each = {"matvec_norm": 2, "attention_step": 1, "matvec": 1, "matvec_glu": 1}
    assert calls("matvec_norm_glu") == {"embed": 1, **{op: 2 * n for op, n in each.items()}}
    ops = set(calls("matvec_norm_glu", "matvec_glu"))
    assert {"swiglu", "matvec_norm"} < ops
    each = {"matvec_norm": 1, "rope_kv": 1, "attention_decode": 1}
    each |= {"matvec": 2, "matvec_norm_glu": 1}
    for found in (calls("attention_step"), calls(kv="q8")):
        assert found == {"embed": 1, **{op: 2 * n for op, n in each.items()}}


def compiled(path: Path) -> Graph:
    with path.open("rb") as file:
        return optimise(import_model(Gguf(file.fileno())).graph)


def only(suffix: str) -> Allow:
    """Of matrices' operations the variants with this ending."""

    def allow(op: str, variant: str) -> bool:
        return not op.startswith("matvec") or variant.partition("_")[2] == suffix

    return allow


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("suffix", ["", "wide_sub", "wide"])
def test_logits(tmp_path: Path, tiny: Any, gpu: Any, kind: str, suffix: str) -> None:
    shape = tiny.shape(vocab=700)
    path = tiny.write(tmp_path / "m.gguf", kind, shape)
    truth = tiny.truth(path, shape).logits(IDS)[-1]
    model = TextModel.load(path, "", gpu)
    info = replace(gpu.info, software=False)
    if suffix and gpu.misfit("matvec_norm", f"{FORMATS[kind]}_{suffix}"):
        with pytest.raises(NoKernel):
            lower(model.graph, info, 64, 16, only(suffix))
        model.close()
        return
    program = lower(model.graph, info, 64, 16, only(suffix))
    used = {"matvec_norm", "attention_step", "matvec_norm_glu"}
    assert used < {c.op for c in program.sequences["decode"]}
    state = State(model, program, gpu.executable(program, model.weights))
    state.run(IDS[:4], head=True)
    for i in IDS[4:]:
        state.run([i], head=True, decode=True)
    assert np.abs(state.logits() - truth).max() < off_by(gpu)
    state.close()
    model.close()


@pytest.fixture(scope="module")
def gpu() -> Any:
    # Imported here: collecting the tests needs no Vulkan.
    from engine.backends.vulkan import VulkanBackend

    backend = VulkanBackend(allow_software=True)
    yield backend
    backend.close()
