# SPDX-License-Identifier: Apache-2.0
"""Writes decoder_onnx/: what PyTorch's exporters (opset 15 by tracing, opset 18 by torch.export)
make of models of tests/engine/family_models.py, without their weights, and decoder_onnx.json: which
weight each initialiser that was left out is, and whether it is transposed.

Needs torch (its CPU build will do), transformers, onnx, onnxscript and gguf; from the project's
root:

    PYTHONPATH=. python tests/data/decoder_onnx.py
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from onnx import numpy_helper

from tests.engine.family_models import CASES, IDS, Case, shapes, values, write_folder

FOLDER = Path(__file__).with_suffix("")
NAMES = ("llama", "qwen2", "qwen3", "phi3")


class Logits(torch.nn.Module):
    """From ids to logits, as people export it."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        mask = torch.ones_like(input_ids)
        return self.model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits


def exported(model: torch.nn.Module, opset: int, path: Path) -> onnx.ModelProto:
    """The model by the exporter that knows the opset."""
    how: dict[str, Any] = {"dynamo": False, "dynamic_axes": {"input_ids": {1: "t"}}}
    if opset >= 18:
        tokens = torch.export.Dim("t", min=2, max=96)
        how = {"dynamo": True, "dynamic_shapes": {"input_ids": {1: tokens}}, "external_data": False}
    ids = (torch.tensor([IDS]),)
    names: dict[str, Any] = {"input_names": ["input_ids"], "output_names": ["logits"]}
    torch.onnx.export(Logits(model), ids, str(path), opset_version=opset, **names, **how)
    return onnx.load(path)


def stripped(proto: onnx.ModelProto, case: Case) -> dict[str, list[Any]]:
    """Takes the weights out; which they are, by the initialisers' names."""
    known = {name: values(case, name, shape) for name, shape in shapes(case)}
    found: dict[str, list[Any]] = {}
    for initialiser in list(proto.graph.initializer):
        array = numpy_helper.to_array(initialiser)
        for name, value in known.items():
            for turned in (False, True):
                want = value.T if turned else value
                if array.shape == want.shape and array.size > 16 and np.array_equal(array, want):
                    found[initialiser.name] = [name, turned]
        if initialiser.name in found:
            proto.graph.initializer.remove(initialiser)
    for part in (proto, proto.graph, *proto.graph.node):
        part.doc_string = ""
        del part.metadata_props[:]
    del proto.graph.value_info[:], proto.functions[:]
    return found


def main() -> int:
    """0."""
    FOLDER.mkdir(exist_ok=True)
    weights: dict[str, dict[str, list[Any]]] = {}
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder), CASES[name])
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            for opset in (15, 18):
                proto = exported(model, opset, Path(folder) / "model.onnx")
                key = f"{name}-{opset}"
                weights[key] = stripped(proto, CASES[name])
                data = gzip.compress(proto.SerializeToString(), mtime=0)
                (FOLDER / f"{key}.onnx.gz").write_bytes(data)
                print(key, len(proto.graph.node), "nodes", len(weights[key]), "weights", len(data))
    lines = [f"{json.dumps(key)}: {json.dumps(found)}" for key, found in weights.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    FOLDER.with_suffix(".json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
