# SPDX-License-Identifier: Apache-2.0
"""The GGUF reader and importer on good, odd and hostile files: one sentence, never a traceback,
hang or flood.
"""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.backends.null import NullBackend
from engine.errors import BadModel, PvrError, UnsupportedModel
from engine.graph import Graph
from engine.importers import ggml, kquants
from engine.importers.gguf import Gguf
from engine.text.compiled import compiled_model, inspect, prepare
from engine.text.model import TextModel
from kernels import weights


@contextmanager
def opened(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("gguf")
    os.write(fd, data)
    try:
        yield fd
    finally:
        os.close(fd)


def check(data: bytes) -> None:
    """The whole way of a file to a compiled model."""
    with opened(data) as fd:
        prepare(fd)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def front(tensors: int, keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def test_metadata_and_tensors(tiny_q8: Path) -> None:
    fd = os.open(tiny_q8, os.O_RDONLY)
    file = Gguf(fd)
    reader = gguf.GGUFReader(tiny_q8)
    assert set(file.tensors) == {t.name for t in reader.tensors}
    assert file.int("llama.embedding_length") == 64
    assert file.text("general.name") == "tiny"
    for t in reader.tensors:
        mine = file.tensors[t.name]
        assert mine.nbytes == t.n_bytes
        assert file.read(mine, 0, mine.shape[0]).tobytes() == t.data.tobytes()
    os.close(fd)


@pytest.mark.parametrize("kind", [name for name in ggml.TYPES if not name.endswith("_K")])
def test_types_are_exact(kind: str) -> None:
    """What is packed equals what the gguf package makes of the same bytes; halves round where they
    have to.
    """
    rng = np.random.default_rng(1)
    t, q = ggml.TYPES[kind], gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(rng.standard_normal((40, 96), dtype=np.float32), q)
    truth = gguf.quants.dequantize(raw, q)
    flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    words = ggml.pack_rows(t, flat, 40, 96, "x")
    got = weights.unpack(t.format, words, 40, 96)
    if t.format == "f16":
        np.testing.assert_allclose(got, truth, rtol=1e-3, atol=1e-7)
    else:
        np.testing.assert_allclose(got, truth, rtol=0, atol=1e-6)


def random_k_quants(kind: str, rows: int, k: int, seed: int = 0) -> np.ndarray:
    """Blocks of any bits with halves of a sensible size: uint8 [rows, bytes of a row]. The gguf
    package reads k-quants, but cannot write them.
    """
    rng = np.random.default_rng(seed)
    t = ggml.TYPES[kind]
    blocks = rng.integers(0, 256, (rows, k // 256, t.nbytes), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for at in halves[kind]:
        scale = rng.uniform(1e-4, 2e-3, (rows, k // 256, 1)).astype("<f2")
        blocks[:, :, at : at + 2] = scale.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_what_the_gguf_package_reads(kind: str) -> None:
    raw = random_k_quants(kind, 40, 768)
    truth = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    parts = kquants.PARTS[kind](raw.reshape(40, 3, -1))
    np.testing.assert_allclose(parts.values(), truth, rtol=1e-6, atol=1e-7)
    t = ggml.TYPES[kind]
    got = weights.unpack(t.format, ggml.pack_rows(t, raw.reshape(-1), 40, 768, "x"), 40, 768)
    blocks = np.abs(truth).reshape(40, -1, 32).max(axis=2, keepdims=True)
    wrong = np.abs(got - truth).reshape(40, -1, 32)
    if t.format == "q4":
        step = parts.scale[:, :, None]
        assert (wrong <= 0.008 * step + blocks * 2.0**-11).all()
    else:
        assert (wrong <= blocks / 250).all()


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_that_are_no_numbers(kind: str) -> None:
    raw = random_k_quants(kind, 16, 256)
    half = {"Q2_K": 80, "Q3_K": 108, "Q4_K": 2, "Q5_K": 0, "Q6_K": 208}[kind]
    raw[3, half : half + 2] = 0xFF
    with pytest.raises(UnsupportedModel, match="blk"):
        ggml.pack_rows(ggml.TYPES[kind], raw.reshape(-1), 16, 256, "blk.0")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_values_that_are_no_numbers(kind: str) -> None:
    t = ggml.TYPES[kind]
    raw = np.full(16 * ggml.row_bytes(t, 32), 0xFF, np.uint8)  # NaN in every float type
    with pytest.raises(UnsupportedModel, match="blk"):
        ggml.pack_rows(t, raw, 16, 32, "blk.0")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_halves_that_are_no_numbers(value: float) -> None:
    """They are packed as they lie, without a look at them as floats."""
    halves = np.full((16, 32), -65504, np.float16)
    t = ggml.TYPES["F16"]
    words = ggml.pack_rows(t, halves.view(np.uint8).reshape(-1), 16, 32, "blk.0")
    assert (weights.unpack("f16", words, 16, 32) == -65504).all()
    halves[7, 9] = value
    with pytest.raises(UnsupportedModel, match="blk"):
        ggml.pack_rows(t, halves.view(np.uint8).reshape(-1), 16, 32, "blk.0")


def test_cut_anywhere(tiny_q8: Path) -> None:
    good = tiny_q8.read_bytes()
    check(good)
    rng = np.random.default_rng(2)
    cuts = {*range(0, 400, 7), *rng.integers(0, len(good), 150).tolist(), len(good) - 1}
    for size in sorted(cuts):
        with pytest.raises(BadModel):
            check(good[:size])


def test_damaged_anywhere(tiny_q8: Path) -> None:
    """Random bytes in the description: it loads or gives a sentence, in little memory."""
    good = tiny_q8.read_bytes()
    with opened(good) as fd:
        end = min(t.offset for t in Gguf(fd).tensors.values())
    rng = np.random.default_rng(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentences = []
    for _ in range(600):
        data = bytearray(good)
        for at in rng.integers(0, end, rng.integers(1, 4)):
            data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(0, 256)])
        try:
            check(bytes(data))
        except PvrError as e:
            sentences.append(str(e))
    assert len(sentences) > 200
    assert all(s.endswith(".") and "\n" not in s for s in sentences)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GGUF",
        b"not a model at all, but long enough to look like one",
        front(1 << 62, 0) + bytes(64),
        front(0, 1 << 62) + bytes(64),
        front(0, 1) + string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61) + bytes(64),
        front(0, 1) + string(b"k") + struct.pack("<IIQ", 9, 6, 1 << 62) + bytes(64),
        front(0, 1) + string(b"k") + struct.pack("<IIQ", 9, 9, 2) + bytes(64),
        front(0, 1) + string(b"k") + struct.pack("<IQ", 8, (1 << 64) - 1) + bytes(64),
        front(0, 1) + struct.pack("<Q", 1 << 40) + bytes(64),
        front(0, 1) + string(b"\xff\xfe") + struct.pack("<II", 4, 1),
        front(0, 1) + string(b"k") + struct.pack("<II", 77, 1) + bytes(64),
        front(0, 2) + (string(b"k") + struct.pack("<II", 4, 1)) * 2,
        front(1, 0) + string(b"t") + struct.pack("<IQQQIQ", 3, 1 << 40, 1 << 40, 1 << 40, 0, 0),
        front(1, 0) + string(b"t") + struct.pack("<I", 1 << 31) + bytes(64),
        front(1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0),
        front(1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(200),
        front(1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 32, 0, 1 << 63) + bytes(200),
        front(2, 0) + (string(b"t") + struct.pack("<IQIQ", 1, 8, 0, 0)) * 2 + bytes(200),
        front(2, 0)
        + string(b"t")
        + struct.pack("<IQIQ", 1, 16, 0, 0)
        + string(b"u")
        + struct.pack("<IQIQ", 1, 16, 0, 32)
        + bytes(200),
    ],
)
def test_hostile_files(data: bytes) -> None:
    with pytest.raises(BadModel, match=r"^The .*\.$"):
        check(data)


def test_sparse_file_of_strings_is_refused_early(tmp_path: Path) -> None:
    """A file with holes of terabytes is no reason to allocate: the description has a bound."""
    path = tmp_path / "sparse.gguf"
    path.write_bytes(front(0, 1) + string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 30))
    os.truncate(path, 1 << 40)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(BadModel, match=r"longer than the file|strings"):
        Gguf(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"general__architecture": "gptneox"}, "'gptneox', which is not supported .*qwen2"),
        ({"llama__rope__scaling__type": "dynamic"}, "dynamic"),
        ({"llama__expert_count": 60, "llama__expert_used_count": 40}, "40 of 60 experts"),
        ({"tokenizer__ggml__model": "bert"}, "bert"),
        ({"split__count": 3}, "split"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, tiny: Any, change: dict[str, Any], sentence: str
) -> None:
    path = tiny.write(tmp_path / "m.gguf", "F16", **change)
    with pytest.raises(UnsupportedModel, match=sentence):
        check(path.read_bytes())


def test_an_unknown_type_is_named_with_its_tensor() -> None:
    data = front(1, 0) + string(b"blk.0.x") + struct.pack("<IQIQ", 1, 256, 16, 0) + bytes(200)
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.x has the type IQ2_XXS"):
        check(data)


def test_big_endian_and_old_versions() -> None:
    with pytest.raises(UnsupportedModel, match="big-endian"):
        check(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(UnsupportedModel, match="version 1"):
        check(front(0, 0, 1))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_heads": 3},
        {"rope_dims": 64},
        {"rope_dims": 1 << 30},
        {"dim": 6, "rope_dims": 4},
        {"hidden": 48},
    ],
)
def test_impossible_dimensions(tmp_path: Path, tiny: Any, options: dict[str, Any]) -> None:
    path = tiny.write(tmp_path / "m.gguf", "F16", tiny.shape(**options))
    with pytest.raises((BadModel, UnsupportedModel)):
        check(path.read_bytes())


def test_inspect_reads_no_weights(tiny_q8: Path) -> None:
    fd = os.open(tiny_q8, os.O_RDONLY)
    info = inspect(fd)
    os.close(fd)
    assert info["arch"] == "llama"
    assert info["context"] == 96
    assert info["format"] == "q8"
    assert info["layers"] == 2


def test_a_load_from_the_cache_reads_the_description_once(
    tmp_path: Path, tiny_q8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, seen = Graph.from_json, []

    def reading(values: Any) -> Graph:
        seen.append(values)
        return read(values)

    TextModel.load(tiny_q8, str(tmp_path / "m.pvrm"), NullBackend())
    monkeypatch.setattr(Graph, "from_json", reading)
    TextModel.load(tiny_q8, str(tmp_path / "m.pvrm"), NullBackend())
    assert len(seen) == 1


def test_cache_is_used_renewed_and_not_needed(tmp_path: Path, tiny_q8: Path, tiny: Any) -> None:
    cache = str(tmp_path / "m.pvrm")
    fd = os.open(tiny_q8, os.O_RDONLY)
    compiled, reason = compiled_model(fd, cache)
    assert reason == ""
    made = os.stat(cache).st_ino
    compiled_model(fd, cache)
    assert os.stat(cache).st_ino == made
    compiled_model(fd, cache, force=True)
    assert os.stat(cache).st_ino != made
    # Damaged: made again.
    made = os.stat(cache).st_ino
    with open(cache, "r+b") as f:
        f.seek(20)
        f.write(b"x")
    compiled_model(fd, cache)
    assert os.stat(cache).st_ino != made
    # From another file: made again.
    other = os.open(tiny.write(tmp_path / "o.gguf", "Q8_0", seed=5), os.O_RDONLY)
    again, _ = compiled_model(other, cache)
    assert again.metadata["source"] != compiled.metadata["source"]
    # A compiled model is a source as well, and what cannot be kept is compiled into memory.
    source = os.open(cache, os.O_RDONLY)
    assert compiled_model(source, "")[0].metadata == again.metadata
    in_memory, reason = compiled_model(fd, str(tmp_path / "no" / "m.pvrm"))
    assert "cannot be written" in reason
    assert in_memory.blob("l0.qkv.0").tobytes() == compiled.blob("l0.qkv.0").tobytes()
    for one in (fd, other, source):
        os.close(one)
