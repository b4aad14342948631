# SPDX-License-Identifier: Apache-2.0
"""Decoders exported as ONNX (tests/data/decoder_onnx.py) become the Graph of their folders, with
the logits of transformers.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.null import NullBackend
from engine.errors import BadModel, PvrError, UnsupportedModel
from engine.graph import Graph
from engine.importers import onnx_wire
from engine.importers.onnx_decoder import import_onnx
from engine.importers.onnx_trace import Trace
from engine.importers.onnx_wire import OnnxGraph
from engine.passes import optimise
from engine.text.compiled import explain_file, prepared
from engine.text.model import TextModel
from tests.engine.family_models import (
    CASES,
    IDS,
    shapes,
    values,
    write_folder,
    write_tokenizer_json,
)

DATA = Path(__file__).parents[1] / "data"
WEIGHTS = json.loads((DATA / "decoder_onnx.json").read_text("utf-8"))
WANT = json.loads((DATA / "family_logits.json").read_text("utf-8"))
# Nodes as exported, those that are left without shapes, positions and masks, the architecture's
# own, and those that are run.
COUNTS = {
    "llama-15": (561, 143, 36, 22), "llama-18": (158, 129, 36, 22),
    "qwen2-15": (567, 149, 42, 24), "qwen2-18": (165, 135, 42, 24),
    "qwen3-15": (609, 179, 40, 24), "qwen3-18": (186, 157, 40, 24),
    "phi3-15": (675, 159, 36, 22), "phi3-18": (164, 131, 36, 22),
}  # fmt: skip


def varint(n: int) -> bytes:
    out = b""
    while n > 0x7F:
        out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
    return out + bytes([n])


def part(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def whole(key: str) -> bytes:
    """The exported file, with its weights."""
    case = CASES[key.partition("-")[0]]
    known = {name: values(case, name, shape) for name, shape in shapes(case)}
    tensors = b""
    for initialiser, (name, turned) in WEIGHTS[key].items():
        value = known[name].T if turned else known[name]
        dims = b"".join(b"\x08" + varint(n) for n in value.shape)
        raw = part(9, np.ascontiguousarray(value, "<f4").tobytes())
        tensors += part(5, dims + b"\x10\x01" + part(8, initialiser.encode()) + raw)
    out = b""
    file = gzip.decompress((DATA / "decoder_onnx" / f"{key}.onnx.gz").read_bytes())
    for number, found in onnx_wire._fields(memoryview(file)):
        if isinstance(found, int):
            out += varint(number << 3) + varint(found)
        else:
            out += part(number, bytes(found) + (tensors if number == 7 else b""))
    return out


def folder(path: Path, key: str) -> Path:
    """A folder with the graph instead of the tensors."""
    write_tokenizer_json(write_folder(path, CASES[key.partition("-")[0]]))
    (path / "model.safetensors").unlink()
    (path / "model.onnx").write_bytes(whole(key))
    return path


def graph_of(path: Path) -> Graph:
    fd = os.open(path, os.O_RDONLY)
    try:
        with prepared(fd) as (metadata, _):
            return Graph.from_json(metadata["graph"])
    finally:
        os.close(fd)


@pytest.fixture
def exported() -> Iterator[OnnxGraph]:
    fd = os.memfd_create("onnx")
    os.write(fd, whole("llama-15"))
    yield onnx_wire.read(fd)
    os.close(fd)


@pytest.mark.parametrize("key", list(WEIGHTS))
def test_the_same_graph_and_logits(tmp_path: Path, key: str) -> None:
    path, name = folder(tmp_path / "onnx", key), key.partition("-")[0]
    graph = graph_of(path)
    own = graph_of(write_tokenizer_json(write_folder(tmp_path / "own", CASES[name])))
    assert [(n.op, n.inputs, n.output) for n in graph.nodes] == [
        (n.op, n.inputs, n.output) for n in own.nodes
    ]
    assert Counter(w.shape for w in graph.weights.values()) >= Counter(
        w.shape for w in own.weights.values()
    )
    log = {change.name: change for change in graph.log}
    counts = (log["fold"].nodes_before, log["fold"].nodes_after, log["recognise"].nodes_after)
    assert (*counts, len(graph.nodes)) == COUNTS[key]
    model = TextModel.load(path, "", NullBackend(reference=True))
    state = model.state()
    state.run(IDS, True)
    np.testing.assert_allclose(state.logits(), WANT[name], rtol=0, atol=0.01)
    state.close()
    model.close()


def test_explain_prints_the_counts(tmp_path: Path) -> None:
    fd = os.open(folder(tmp_path / "m", "llama-15"), os.O_RDONLY)
    table = explain_file(fd)
    os.close(fd)
    assert "561 -> 143" in table
    assert "22 -> 22" in table


def test_frequencies_are_those_of_the_base(exported: OnnxGraph) -> None:
    """What float32 rounded is found again, so that long positions are right."""
    rope = import_onnx(exported).ropes["rope"]
    np.testing.assert_array_equal(rope.freqs, 1e4 ** (-np.arange(0, 16, 2) / 16))


def changed(graph: OnnxGraph, op: str, change: dict[str, Any]) -> OnnxGraph:
    """The graph with its last node of an operator changed."""
    at = max(i for i, n in enumerate(graph.nodes) if n.op == op)
    graph.nodes[at] = replace(graph.nodes[at], **change)
    return graph


@pytest.mark.parametrize(
    ("op", "change", "sentence"),
    [
        ("Sigmoid", {"op": "Tanh"}, "a feed-forward part of a kind that is not known"),
        ("Sigmoid", {"op": "Erf"}, "a feed-forward part"),
        ("Neg", {"op": "Abs"}, "an attention of a kind"),
        ("Softmax", {"op": "Sigmoid", "attrs": {}}, "an attention"),
        ("Cos", {"op": "Exp"}, "an attention"),
        ("LessOrEqual", {"op": "GreaterOrEqual"}, "an attention"),
        ("Sqrt", {"op": "Abs"}, "a norm"),
        ("Softmax", {"op": "Hardmax"}, "the operator Hardmax"),
    ],
)
def test_what_computes_something_else_is_refused(
    exported: OnnxGraph, op: str, change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UnsupportedModel, match=sentence):
        import_onnx(changed(exported, op, change))


def test_a_model_with_a_cache_is_refused(exported: OnnxGraph) -> None:
    exported.inputs["past_key_values.0.key"] = [1, 2, 0, 16]
    with pytest.raises(UnsupportedModel, match="past_key_values"):
        import_onnx(exported)


def test_a_graph_that_does_not_hold_together(exported: OnnxGraph) -> None:
    del exported.nodes[40]
    with pytest.raises(BadModel, match="nobody makes"):
        Trace(exported)


def test_any_node_may_be_missing_or_another(exported: OnnxGraph) -> None:
    """A sentence, whatever is wrong, or the same model."""
    rng = np.random.default_rng(5)
    nodes, sentences = list(exported.nodes), []
    for _ in range(120):
        exported.nodes[:] = nodes
        at, other = (int(i) for i in rng.integers(0, len(nodes), 2))
        wrong = {"op": nodes[other].op, "attrs": nodes[other].attrs}
        exported.nodes[at] = replace(nodes[at], inputs=nodes[at].inputs[::-1], **wrong)
        try:
            optimise(import_onnx(exported).graph)
        except PvrError as e:
            sentences.append(str(e))
    assert len(sentences) > 60
    assert all(s.endswith(".") and "\n" not in s for s in sentences)
