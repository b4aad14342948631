# SPDX-License-Identifier: Apache-2.0
"""A prompt's last layer for its last token alone: the digits are those of the whole layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.base import Backend, DeviceInfo, Limits
from engine.backends.cpu import CpuBackend
from engine.backends.crosscheck import CheckedBackend
from engine.backends.null import NullBackend
from engine.graph import Graph, explain
from engine.importers.families import import_model
from engine.importers.gguf import Gguf
from engine.lower import Lowering, lower
from engine.passes import optimise
from engine.shards import matrix_shards
from engine.tail import last_layer
from engine.text.model import State, TextModel
from tests.engine.family_models import CASES, IDS, write_folder, write_tokenizer_json

CPU = DeviceInfo("cpu", "a CPU", "none", True, Limits(max_storage_range=1 << 40))
FAMILIES = [pytest.param(name, id=name.replace(" ", "-")) for name in CASES]


def whole(patch: pytest.MonkeyPatch, make: Callable[[], State]) -> State:
    """What `make` makes, with all of the last layer in `prefill`."""
    with patch.context() as within:
        within.setattr(Lowering, "_last_layer", lambda self: None)
        return make()


def results(state: State, pieces: list[list[int]]) -> list[np.ndarray]:
    """The caches and the logits after a prompt in pieces, and the logits of a token more."""
    assert not state.common([])
    for piece in pieces:
        state.run(piece, head=piece is pieces[-1])
    program, out = state.executable.program, [state.logits()]  # type: ignore[attr-defined]
    out += [state.executable.read(name, program.buffers[name].nbytes) for name in state.caches]
    state.run([7], head=True, decode=True)
    return [*out, state.logits()]


def same(model: TextModel, patch: pytest.MonkeyPatch, context: int) -> None:
    def make() -> State:
        return model.state(context)

    state, old = make(), whole(patch, make)
    for cuts in ([len(IDS)], [1], [len(IDS) - 1, 1], [3, len(IDS) - 3]):
        at = np.cumsum([0, *cuts]).tolist()
        pieces = [IDS[a:b] for a, b in pairwise(at)]
        for a, b in zip(results(state, pieces), results(old, pieces), strict=True):
            np.testing.assert_array_equal(a, b)
    assert {"tail", "rest"} <= state.executable.program.sequences.keys()  # type: ignore[attr-defined]
    for hidden in (state, old):
        hidden.common([])
        hidden.run(IDS, head=False, hidden=True)
    np.testing.assert_array_equal(state.hidden(len(IDS)), old.hidden(len(IDS)))
    state.close()
    old.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = write_tokenizer_json(write_folder(tmp_path / "m", CASES[name]))
    model = TextModel.load(path, "", CpuBackend(2))
    same(model, monkeypatch, CASES[name].context)
    model.close()


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("device", ["cpu", "null", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_devices(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, device: str
) -> None:
    """Of one layer alone, too."""
    backend: Backend = CpuBackend(2) if device == "cpu" else NullBackend(reference=True)
    if device == "gpu":
        from engine.backends.vulkan import VulkanBackend

        backend = VulkanBackend(allow_software=True)
    for layers in (1, 2):
        path = tiny.write(tmp_path / f"{layers}.gguf", kind, tiny.shape(layers=layers))
        model = TextModel.load(path, "", backend)
        same(model, monkeypatch, 64)
        model.close()
    backend.close()


@pytest.fixture(scope="module")
def graph(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    path = tmp_path_factory.mktemp("tail") / "m.gguf"
    with tiny.write(path, "Q8_0", tiny.shape(heads=8, hidden=128)).open("rb") as file:
        return optimise(import_model(Gguf(file.fileno())).graph)


def test_what_a_prompt_computes(graph: Graph) -> None:
    assert "one row for 1 head, last layer but K and V" in explain(graph)
    program = lower(graph, CPU, 64, 16)
    made = {name: Counter(c.op for c in calls) for name, calls in program.sequences.items()}
    layers = made["decode"]["attention_decode"]
    assert made["prefill"]["attention_prefill"] == layers - 1
    assert made["prefill"]["rope_kv"] == layers
    for name in ("rest", "tail"):
        assert made[name]["attention_prefill"] == made[name]["rope_kv"] == 1
    assert made["tail"] - made["rest"] == {"last_to_first": 1}
    assert {c.params for c in program.sequences["tail"][1:]} == {256}
    # The query's rows of the last product are left out, 64 at a time.
    layer = last_layer(graph)
    assert layer is not None
    product = next(n for n in graph.nodes if n.name == layer.product)
    ranges = [
        b.offset
        for c in program.sequences["prefill"]
        for b in c.bindings
        if c.op == "matmul" and b.buffer in product.weights
    ]
    rest = [c for c in program.sequences["rest"] if c.bindings[0].buffer in product.weights]
    assert len(rest) > len(ranges) > 0


@pytest.mark.gpu
def test_its_slices_are_checked(tiny_q8: Path) -> None:
    """Samples are computed again with the parameters of the tail's own calls."""
    from engine.backends.vulkan import VulkanBackend

    backend = VulkanBackend(allow_software=True)
    checked = CheckedBackend(backend, 1.0, np.random.default_rng(1))
    model = TextModel.load(tiny_q8, "", checked)
    state = model.state(64)
    for _ in range(60):
        state.common([])
        state.run(IDS, head=True)
    assert checked.checks > 60
    assert checked.failed == 0
    assert state.executable.passed["last_to_first.base"] >= 1  # type: ignore[attr-defined]
    state.close()
    model.close()
    backend.close()


def test_graphs_without_it(graph: Graph) -> None:
    """A second value that the layer reads, or a product before its rotation that others read."""
    layer = last_layer(graph)
    assert layer is not None
    early = graph.nodes[0].output
    nodes = [
        replace(n, inputs=(*n.inputs, early)) if n is graph.nodes[-1] else n for n in graph.nodes
    ]
    assert early != layer.stream
    assert last_layer(replace(graph, nodes=tuple(nodes))) is None
    product = next(n for n in graph.nodes if n.name == layer.product)
    nodes[-1] = replace(graph.nodes[-1], inputs=(product.output,))
    assert last_layer(replace(graph, nodes=tuple(nodes))) is None
    assert last_layer(replace(graph, nodes=graph.nodes[:1])) is None


def test_a_device_without_the_kernel(graph: Graph) -> None:
    program = lower(graph, CPU, 64, 16, lambda op, variant: op != "last_to_first")
    assert not {"tail", "rest"} & program.sequences.keys()
    made = [c.op for c in program.sequences["prefill"]]
    assert made.count("attention_prefill") == made.count("rope_kv")
    assert CpuBackend(1).misfit("last_to_first", "base") == ""
    assert "compiled" in CpuBackend(1).misfit("no such", "base")


def test_shards_begin_where_asked(graph: Graph) -> None:
    w = replace(next(iter(graph.weights.values())), shape=(200, 64), format="q8", layout="tile16")

    def rows(cut: int, most: int = 1 << 40) -> list[tuple[int, int]]:
        return [(r, n) for _, r, n in matrix_shards(w, Limits(max_storage_range=most), cut)]

    assert [rows(cut) for cut in (-5, 0, 63, 200, 300)] == [[(0, 200)]] * 5
    assert rows(130) == [(0, 128), (128, 72)]
    small = 4 * 16 * 64 * 9 // 8  # 64 rows
    assert rows(128, small) == [(0, 64), (64, 64), (128, 64), (192, 8)]
