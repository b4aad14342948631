# SPDX-License-Identifier: Apache-2.0
"""onnxruntime as a peer: its models' weights, how it is run, and the rows beside it."""

from __future__ import annotations

import argparse
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks import energy, onnx_model, onnx_peer, peers, text_article, text_cpu
from benchmarks.onnx_model import Missing
from benchmarks.peer_process import Took
from tools import random_gguf

TINY = random_gguf.SHAPES["tiny"]


@pytest.mark.parametrize("weights", onnx_model.BITS)
def test_products_have_the_weights_of_the_file(weights: str) -> None:
    raw = random_gguf._random(np.random.default_rng(3), weights, 6, 96)
    bits = onnx_model.BITS[weights]
    packed, scales = onnx_model.blocks(raw, bits)
    assert packed.shape == (6, 3, 4 * bits)
    assert scales.dtype == np.float32
    # As MatMulNBits reads them without zero points: low halves of bytes first.
    values = packed if bits == 8 else np.stack((packed & 15, packed >> 4), -1).reshape(6, 3, 32)
    found = (values.astype(np.float32) - (1 << bits - 1)) * scales[..., None]
    wanted = gguf.quants.dequantize(raw, random_gguf.WEIGHTS[weights])
    assert np.array_equal(found.reshape(6, 96), wanted)


def test_rows_of_a_head_are_in_halves() -> None:
    rows = np.arange(12)[:, None]
    halves = onnx_model.halves(rows, 2)
    assert halves[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.parametrize(("shape", "weights"), [("tiny", "q4_1"), ("olmoe-small", "q4_0")])
def test_what_has_no_form_there(tmp_path: Path, shape: str, weights: str) -> None:
    with pytest.raises(Missing, match=r"MatMulNBits has no form of (q4_1|experts)"):
        onnx_model.write(Path("m.gguf"), random_gguf.SHAPES[shape], weights, tmp_path)
    assert not list(tmp_path.iterdir())


# Sleeping threads are better at prompts; at tokens it is the second level, and threads that spin.
PEER = """#!{python}
import os, sys
assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
_, model, threads, spin = sys.argv
for line in sys.stdin:
    kind, n = line.split()
    best = ("4.onnx", "0") if kind == "prefill" else ("0.onnx", "1")
    print(9, int(n) * (1 if (model, spin) == best else 2), flush=True)
"""


def program(path: Path, text: str) -> list[str]:
    path.write_text(text.replace("{python}", sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


MODELS = {4: Path("4.onnx"), 0: Path("0.onnx")}


def test_each_phase_runs_in_its_best_way(tmp_path: Path) -> None:
    command = program(tmp_path / "peer", PEER)
    with onnx_peer.OnnxPeer(MODELS, 2, "cpu", command) as peer:
        peer.choose(["prefill128", "decode32"])
        found = {phase: str(way) for phase, way in peer.best.items()}
        assert found["prefill128"] == "accuracy level 4, threads sleep"
        assert found["decode32"] == "accuracy level 0, threads spin"
        assert peer.run("decode32") == Took(9, 32)
        assert peer.run("prefill128") == Took(9, 128)


def test_a_peer_that_does_not_run_the_model_is_told(tmp_path: Path) -> None:
    command = program(tmp_path / "peer", "#!/bin/sh\nexit 1\n")
    with (
        onnx_peer.OnnxPeer(MODELS, 2, "wall", command) as peer,
        pytest.raises(Missing, match="onnxruntime ended at prefill 4"),
    ):
        peer.choose(["prefill128"])


def test_a_peer_that_is_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def wheel(package: str) -> str:
        raise subprocess.CalledProcessError(1, ["pip", "install", package])

    monkeypatch.setattr(peers, "wheel", wheel)
    with pytest.raises(Missing, match=r"not to be had here: .*pip"):
        onnx_peer.version()


class Fake:
    """A peer that takes a second a run."""

    def __init__(self, *_: object) -> None:
        self.best = {"prefill128": "as it does"}

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def choose(self, phases: list[str]) -> None:
        assert phases == ["prefill128", "decode32"]

    def run(self, phase: str) -> Took:
        return Took(1, 2)


@pytest.fixture
def article(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Papers' bench with the tiny shape, fakes for peers and no energy."""

    def model_file(shape: str, weights: str) -> Path:
        path = tmp_path / f"{shape}-{weights}.gguf"
        random_gguf.write(path, shape, weights)
        return path

    monkeypatch.setattr(text_cpu, "model_file", model_file)
    monkeypatch.setattr(text_article, "_meter", energy.Meter(tmp_path, idle_s=0.0))
    monkeypatch.setattr(text_article, "_gpu", lambda _software: None)
    monkeypatch.setattr(text_article, "_onnx", {})
    monkeypatch.setattr(text_article, "LlamaPeer", Fake)
    monkeypatch.setattr(text_article, "OnnxPeer", Fake)
    monkeypatch.setattr(onnx_peer, "version", lambda: "1.2")
    monkeypatch.setattr(onnx_model, "write", lambda *_: {})
    given: dict[str, Any] = {"shape": "tiny", "weights": ["q4_0"], "repeats": 2, "threads": 1}
    given |= {"cpu_peers": text_article.CPU_PEERS, "likely": True}
    return argparse.Namespace(**given, quick=True, software=False, clock="cpu")


LLAMA = ["tiny q4_0 prefill128 cpu", "tiny q4_0 decode cpu"]


def test_rows_beside_onnxruntime(article: argparse.Namespace) -> None:
    rows = text_article.measure(article)
    assert [row.name for row in rows] == [*LLAMA, *(f"{name} onnxruntime" for name in LLAMA)]
    assert [row.peer_name for row in rows] == ["llama.cpp"] * 2 + ["onnxruntime 1.2"] * 2
    assert [row.peer for row in rows] == [2e3 / 128, 2e3 / 32] * 2
    facts = text_article.facts()
    assert facts["onnxruntime, tiny q4_0"] == "1.2, prefill128: as it does"
    assert "MatMulNBits" in facts["onnxruntime"]


def test_no_rows_where_onnxruntime_is_not(
    article: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version() -> str:
        raise Missing("onnxruntime is not to be had here: no wheel")

    monkeypatch.setattr(onnx_peer, "version", version)
    assert [row.name for row in text_article.measure(article)] == LLAMA
    told = text_article.facts()["onnxruntime, tiny q4_0"]
    assert told == "not measured: onnxruntime is not to be had here: no wheel"


# Tells all rates as 50 tokens/s, and has no other ways than those that are likely.
BENCH = """#!{python}
import json, os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-fa"] == "1"
assert "GGML_VK_DISABLE_COOPMAT" not in os.environ
shape = [int(given[option]) for option in ("-p", "-n", "-d")]
assert shape in ([128, 0, 0], [0, 32, 128])
keys = ("n_prompt", "n_gen", "n_depth")
print(json.dumps([dict(zip(keys, shape), flash_attn=True, samples_ts=[50.0] * int(given["-r"]))]))
"""


@pytest.mark.gpu
def test_our_gpu_against_our_cpu_alone(
    article: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from engine.backends.vulkan import VulkanBackend

    class NotWanted:
        def __init__(self, *_: object) -> None:
            raise AssertionError("no peer of the CPU is wanted")

    bench = tmp_path / "llama-bench"
    bench.write_text(BENCH.replace("{python}", sys.executable))
    bench.chmod(0o755)
    monkeypatch.setenv("PVRD_LLAMA_VULKAN", str(tmp_path))
    monkeypatch.setattr(text_article, "LlamaPeer", NotWanted)
    monkeypatch.setattr(text_article, "OnnxPeer", NotWanted)
    monkeypatch.setattr(text_article, "_gpu", lambda _software: VulkanBackend(True))
    article.cpu_peers, article.clock, article.repeats = [], "wall", 1
    rows = {row.name: row for row in text_article.measure(article)}
    for phase in ("prefill128", "decode"):
        assert rows[f"tiny q4_0 {phase} cpu"].peer_name == "no peer"
        assert rows[f"tiny q4_0 {phase} gpu"].peer == 20
        assert rows[f"tiny q4_0 {phase} gpu against cpu"].peer_name == "our CPU"
    assert not any("onnxruntime" in name for name in rows)


@pytest.fixture
def onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer, which other tests do not find."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    onnx_peer.version()


@pytest.mark.long
@pytest.mark.usefixtures("onnxruntime")
@pytest.mark.parametrize("weights", onnx_model.BITS)
def test_onnxruntime_answers_as_the_engine_does(tmp_path: Path, weights: str) -> None:
    """A prompt and tokens behind it give what the whole gives, by the same weights as ours."""
    from engine.backends.cpu import CpuBackend
    from engine.text.model import TextModel

    file = tmp_path / "tiny.gguf"
    random_gguf.write(file, "tiny", weights)
    ids = [(7 * i + 3) % TINY.vocab for i in range(24)]
    backend = CpuBackend(2)
    model = TextModel.load(file, str(tmp_path / "tiny.pvrm"), backend)
    state = model.state(64)
    state.run(ids, head=True)
    ours = state.logits().copy()
    for closing in (state, model, backend):
        closing.close()
    models = onnx_model.write(file, TINY, weights, tmp_path)
    assert models == onnx_model.write(file, TINY, weights, tmp_path)
    assert not list(tmp_path.glob("*.part"))
    assert len(models) == len(onnx_model.ACCURACIES[weights])
    for path in models.values():
        whole = onnx_peer.Decoder(path, 2, spin=False).run(ids, 0)
        decoder = onnx_peer.Decoder(path, 2, spin=True)
        decoder.run(ids[:16], 0)
        for at in range(16, 24):
            behind = decoder.run(ids[at : at + 1], at)
        assert np.abs(behind - whole).max() < 1e-3
        # Ours has int8 activations and halves in its caches.
        assert np.corrcoef(whole, ours)[0, 1] > 0.998


@pytest.mark.long
@pytest.mark.usefixtures("onnxruntime")
def test_onnxruntime_is_timed_in_a_process(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    random_gguf.write(file, "tiny", "q8_0")
    models = onnx_model.write(file, TINY, "q8_0", tmp_path)
    with onnx_peer.OnnxPeer(models, 1, "wall") as peer:
        peer.choose(["prefill128", "decode32"])
        for phase in peer.best:
            took = peer.run(phase)
            assert took.wall > 0
            assert took.cpu > 0
