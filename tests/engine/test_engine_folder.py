# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: shards, types, and hostile files: one sentence, never a traceback, hang or
flood.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.null import NullBackend
from engine.errors import BadModel, PvrError, UnsupportedModel
from engine.importers.hf import Folder
from engine.importers.safetensors import SafeTensors
from engine.text.compiled import compiled_model, fingerprint, inspect, prepared
from engine.text.model import TextModel
from tests.engine.family_models import (
    CASES,
    IDS,
    Case,
    write_folder,
    write_safetensors,
    write_tokenizer_json,
)

LLAMA = CASES["llama"]


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def check(path: Path) -> None:
    """The whole way of a folder to a compiled model."""
    with opened(path) as fd, prepared(fd):
        pass


def folder(path: Path, case: Case = LLAMA, dtype: str = "F32", files: int = 1) -> Path:
    return write_tokenizer_json(write_folder(path, case, dtype, files))


def spoiled(path: Path, **config: Any) -> Path:
    """A folder whose config.json does not go with its tensors."""
    folder(path)
    (path / "config.json").write_text(json.dumps({**LLAMA.config, **config}))
    return path


def logits(path: Path) -> np.ndarray:
    model = TextModel.load(path, "", NullBackend(reference=True))
    state = model.state()
    state.run(IDS, True)
    out = state.logits()
    state.close()
    model.close()
    return out


def test_shards_and_types_change_nothing(tmp_path: Path) -> None:
    whole = logits(folder(tmp_path / "whole"))
    np.testing.assert_array_equal(logits(folder(tmp_path / "cut", files=3)), whole)
    np.testing.assert_array_equal(logits(folder(tmp_path / "half", dtype="F16")), whole)
    near = logits(folder(tmp_path / "brain", dtype="BF16"))
    assert np.abs(near - whole).max() < 0.2


def test_inspect_and_cache(tmp_path: Path) -> None:
    path, cache = folder(tmp_path / "m"), str(tmp_path / "m.pvrm")
    with opened(path) as fd:
        info = inspect(fd)
        assert (info["arch"], info["format"], info["layers"]) == ("llama", "f16", 2)
        mark = fingerprint(fd)
        compiled, reason = compiled_model(fd, cache)
        assert (reason, compiled.metadata["source"]) == ("", mark)
        made = os.stat(cache).st_ino
        compiled_model(fd, cache)
        assert os.stat(cache).st_ino == made
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
        assert fingerprint(fd) != mark
        compiled_model(fd, cache)
        assert os.stat(cache).st_ino != made


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "bert"}, r"type 'bert', which is not supported \(.*llama"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "scaling 'dynamic'"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"model_type": "olmoe", "num_experts": 8, "clip_qkv": 1.0}, "clips"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "YaRN"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UnsupportedModel, match=sentence):
        check(spoiled(tmp_path / "m", **config))


def test_a_tensor_that_nobody_reads_is_named(tmp_path: Path) -> None:
    path, name = folder(tmp_path / "m"), "model.layers.0.self_attn.o_proj.bias"
    write_safetensors(path / "extra.safetensors", {name: np.zeros(64, np.float32)})
    with opened(path / "model.safetensors") as fd:
        names = dict.fromkeys(SafeTensors(fd).tensors, "model.safetensors")
    index = {"weight_map": names | {name: "extra.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_output\.bias"):
        check(path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_an_index_with_a_name_that_no_file_has(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path / "m")
    index = json.dumps({"weight_map": {"model.norm.weight": name}})
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(BadModel, match="speaks of a file with the name"):
        check(path)


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": None},
        {"hidden_size": "64"},
        {"hidden_size": 1 << 40},
        {"hidden_size": 10**400},
        {"head_dim": 10**400},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"num_hidden_layers": 10**9},
        {"rms_norm_eps": 1e40},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        {"rope_scaling": []},
        {"model_type": 7},
    ],
    ids=str,
)
def test_impossible_configurations(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises((BadModel, UnsupportedModel), match=r"^The .*\.$"):
        check(spoiled(tmp_path / "m", **config))


@pytest.mark.parametrize("scalar", [0, -1])
def test_a_scale_of_gemma_that_makes_no_sense(tmp_path: Path, scalar: int) -> None:
    path = folder(tmp_path / "m", CASES["gemma2"])
    config = {**CASES["gemma2"].config, "query_pre_attn_scalar": scalar}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel, match="query_pre_attn_scalar makes no sense"):
        check(path)


def test_weights_that_are_no_safetensors_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"in pytorch_model\.bin; they are read from safet"):
        check(path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        path = folder(tmp_path / name)
        (path / name).unlink()
        with pytest.raises(BadModel, match=name):
            check(path)
    path = folder(tmp_path / "out", files=2)
    index = {"weight_map": {"model.norm.weight": "../config/model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModel, match="outside of it"):
        check(path)
    os.mkfifo(tmp_path / "out" / "x.safetensors")
    index = {"weight_map": {"model.norm.weight": "x.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModel, match=r"x\.safetensors is no file"):
        check(path)


def one(header: Any, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any = (4,), offsets: Any = (0, 16), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (1 << 62).to_bytes(8, "little") + bytes(100),
        one(b"{"),
        one(b"[1]"),
        one(b"[" * 100_000),
        one(b'{"a":1e999999999}'),
        one(b'{"a":' + b"9" * 5000 + b"}"),
        one(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},' * 2 + b'"b":1}'),
        one({"a": 1}),
        one({"a": {}}),
        one({"a": {**entry(), "more": 1}}),
        one({"a": entry(shape=[-4])}),
        one({"a": entry(shape=[True])}),
        one({"a": entry(shape=[1 << 61, 1 << 61])}),
        one({"a": entry(shape=[])}),
        one({"a": entry(shape="4")}),
        one({"a": entry(shape=[0], offsets=[0, 0])}),
        one({"a": entry(offsets=[0, 12])}),
        one({"a": entry(offsets=[56, 72])}),
        one({"a": entry(offsets=[16, 0])}),
        one({"a": entry(), "b": entry(offsets=[8, 24])}),
        one({"": entry()}),
        one({"a\nb": entry()}),
        one({"a" * 300: entry()}),
    ],
)
def test_hostile_headers(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with opened(path) as fd, pytest.raises(BadModel, match=r"^The .*\.$"):
        SafeTensors(fd)


def test_an_unknown_type_is_named_with_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(one({"a.weight": entry(dtype="F8_E4M3", shape=[16])}))
    with opened(path) as fd, pytest.raises(UnsupportedModel, match=r"a\.weight has the type F8_E4"):
        SafeTensors(fd)


def test_damaged_anywhere(tmp_path: Path) -> None:
    """Random bytes in the headers and descriptions: it loads or gives a sentence, in little
    memory.
    """
    path = folder(tmp_path / "m")
    rng = np.random.default_rng(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentences = []
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        good = (path / name).read_bytes()
        end = 8 + int.from_bytes(good[:8], "little") if name.endswith("s") else len(good)
        for _ in range(80):
            data = bytearray(good)
            for at in rng.integers(0, end, rng.integers(1, 4)):
                data[at] = rng.choice([0, 0x22, 0x39, 0x2D, 0x7B, 0xFF, rng.integers(0, 256)])
            (path / name).write_bytes(data[: rng.integers(1, len(data))] if at % 5 == 0 else data)
            try:
                check(path)
            except PvrError as e:
                sentences.append(str(e))
        (path / name).write_bytes(good)
    assert len(sentences) > 100
    assert all(s.endswith(".") and "\n" not in s for s in sentences)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_a_folder_reads_rows_across_its_pieces(tmp_path: Path) -> None:
    """A stack of experts is the matrices of each, one under the other, however it is read."""
    path = write_folder(tmp_path / "m", CASES["olmoe"])
    with opened(path) as fd, Folder(fd) as source:
        tensor = source.tensors["blk.0.ffn_up_exps.weight"]
        assert tensor.shape == (8 * 96, 64)
        whole = source.read(tensor, 0, 8 * 96)
        parts = [source.read(tensor, row, min(100, 768 - row)) for row in range(0, 768, 100)]
        assert np.concatenate(parts).tobytes() == whole.tobytes()
