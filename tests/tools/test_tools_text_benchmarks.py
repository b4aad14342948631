# SPDX-License-Identifier: Apache-2.0
"""Models of random weights, and how the text benchmarks run their peers."""

from __future__ import annotations

import io
import stat
import sys
import tarfile
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks import common, llama_peer, peer_process, peers, text_gpu
from tools import random_gguf

# Tells what it was asked for as llama-bench does: faster with flash attention, and in the mode
# without the second kind of cooperative matrices.
BENCH = """#!{python}
import json, os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
numbers = lambda option: [int(n) for n in given[option].split(",")]
kind = 2 - ("GGML_VK_DISABLE_COOPMAT2" in os.environ) - ("GGML_VK_DISABLE_COOPMAT" in os.environ)
assert "GGML_VK_VISIBLE_DEVICES" not in os.environ
runs = []
for depth in numbers("-d"):
    for attention in numbers("-fa"):
        for p, n in [(p, 0) for p in numbers("-p") if p] + [(0, n) for n in numbers("-n") if n]:
            rate = 100.0 + 10 * attention + 50 * (kind == 1)
            runs.append(dict(n_prompt=p, n_gen=n, n_depth=depth, flash_attn=bool(attention),
                             samples_ts=[rate, rate + 1, rate + 2][: int(given["-r"])]))
print(json.dumps(runs))
"""


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    path = tmp_path / "llama-bench"
    path.write_text(BENCH.replace("{python}", sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("weights", random_gguf.WEIGHTS)
def test_a_random_model_has_its_shape(tmp_path: Path, weights: str) -> None:
    shape, path = random_gguf.SHAPES["tiny"], tmp_path / "tiny.gguf"
    random_gguf.write(path, "tiny", weights)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(found) == 2 + 7 * shape.layers + 1 + 2 * shape.layers
    for name, rows, columns in shape.matrices():
        tensor = found[f"{name}.weight"]
        assert list(tensor.shape) == [columns, rows]
        assert tensor.tensor_type == random_gguf.WEIGHTS[weights]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert values.std() == pytest.approx(columns**-0.5, rel=0.15)
        assert abs(values.mean()) < 0.15 * columns**-0.5  # -8 to 7 is not even
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("weights", random_gguf.WEIGHTS)
def test_large_matrices_are_made_of_what_was_drawn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.setattr(random_gguf, "_MANY", 8)
    monkeypatch.setattr(random_gguf, "_DRAWN", 1009)
    path = tmp_path / "tiny.gguf"
    random_gguf.write(path, "tiny", weights)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, rows, columns in random_gguf.SHAPES["tiny"].matrices():
        tensor = found[f"{name}.weight"]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert values.std() == pytest.approx(columns**-0.5, rel=0.15)
        assert len(np.unique(values, axis=0)) == rows
    one, other = (found[f"blk.{i}.ffn_up.weight"].data for i in range(2))
    assert not np.array_equal(one, other)


def test_bytes_of_a_token_leave_out_an_embedding_of_its_own() -> None:
    tied, own = random_gguf.SHAPES["smollm2-135m"], random_gguf.SHAPES["llama3-8b"]
    assert random_gguf.token_bytes(tied, "q8_0") == pytest.approx(134.5e6 * 34 / 32, rel=0.01)
    assert random_gguf.token_bytes(own, "q4_0") == pytest.approx(7.5e9 * 18 / 32, rel=0.01)


def test_the_best_way_of_the_peer_is_found(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "7")
    peer = text_gpu.Peer(bench, Path("model.gguf"), software=False)
    best = peer.best(text_gpu.PHASES, 3)
    assert set(best) == set(text_gpu.PHASES)
    assert set(best.values()) == {(161.0, text_gpu.Way("coopmat", "1"))}


def test_likely_ways_alone_are_tried(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    likely = text_gpu.ways(likely=True)
    assert set(likely) < set(text_gpu.ways(likely=False)) == set(text_gpu.MODES)
    peer = text_gpu.Peer(bench, Path("model.gguf"), software=False, ways=likely)
    assert peer.best(["decode"], 2) == {"decode": (160.5, text_gpu.Way("coopmat", "1"))}
    said = capsys.readouterr().err
    assert said.count("llama.cpp decode, ") == 2
    assert "-fa 0" not in said


def test_a_share_of_the_copy_rate() -> None:
    row = common.row("m q4_0 decode", "tokens/s", 100.0, 50.0, "peer")
    share = text_gpu.share(row, nbytes=2_000_000, copy=1e9)
    assert (share.ours, share.peer, share.ratio) == (20.0, 10.0, 2.0)


def test_the_vulkan_peer_that_is_named(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PVRD_LLAMA_VULKAN", str(bench.parent))
    assert peers.llama_vulkan() == bench.parent
    bench.unlink()
    with pytest.raises(SystemExit):
        peers.llama_vulkan()


@pytest.mark.parametrize("old", [False, True])
def test_a_peers_sources_are_unpacked_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    if old:  # Python before 3.11.4, as in Debian 12
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
        monkeypatch.delattr(tarfile.TarFile, "extractall")
        # Newer ones warn without a filter, which the old ones did not know.
        trusting = staticmethod(lambda member, _path: member)
        monkeypatch.setattr(tarfile.TarFile, "extraction_filter", trusting, raising=False)
    good, bad = tmp_path / "good.tar.gz", tmp_path / "bad.tar.gz"
    for path, name in ((good, "top/src/a.c"), (bad, "../outside")):
        with tarfile.open(path, "w:gz") as tar:
            member = tarfile.TarInfo(name)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"ok"))
    peers.unpack(good, tmp_path / "here")
    assert (tmp_path / "here/top/src/a.c").read_bytes() == b"ok"
    with pytest.raises((SystemExit, tarfile.TarError), match="outside"):
        peers.unpack(bad, tmp_path / "here")
    assert not (tmp_path / "outside").exists()


@pytest.mark.gpu
def test_kernels_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix in each layout gives what numpy gives, a draw chooses what the kernel chooses."""
    from contextlib import ExitStack

    from benchmarks import text_kernels
    from engine.backends.vulkan.backend import VulkanBackend

    monkeypatch.setattr(text_kernels, "CHAIN", 2)
    backend = VulkanBackend(allow_software=True)
    try:
        for fmt in text_kernels.FORMS:
            for sixteen in (True, False):
                with ExitStack() as stack:
                    assert text_kernels._layout(backend, stack, fmt, sixteen, True)() > 0
        if backend._device.draws:
            rows = list(text_kernels._choice(backend, 5, 1))
            assert [row.peer_name for row in rows] == ["route", "route"]
    finally:
        backend.close()


# Is slow in all ways but one, as llama_rate tells it.
RATE = """#!{python}
import os, sys
_, file, threads, repack, attention, behind = sys.argv
assert behind == "128"
assert os.environ.get("OMP_WAIT_POLICY") == "passive"
assert "GOMP_SPINCOUNT" not in os.environ  # that would count for more
assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
for line in sys.stdin:
    phase, n = line.split()
    best = ("1", "0") if phase == "decode" else ("0", "1")
    print(9, int(n) * (1 if (repack, attention) == best else 2), flush=True)
"""


def test_the_peer_on_the_cpu_runs_in_its_best_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "20000")
    path = tmp_path / "llama_rate"
    path.write_text(RATE.replace("{python}", sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    with llama_peer.LlamaPeer(Path("model.gguf"), 2, "cpu", 128, path) as peer:
        peer.choose(["decode32", "prefill128"])
        assert peer.best == {
            "decode32": llama_peer.Way(repack=True, attention=False),
            "prefill128": llama_peer.Way(repack=False, attention=True),
        }
        assert peer.run("decode32") == peer_process.Took(9, 32)
        assert peer.run("prefill128").by("cpu") == 128
        with pytest.raises(KeyError):
            peer.run("prefill512")


def test_a_peer_that_ends_is_told(tmp_path: Path) -> None:
    path = tmp_path / "llama_rate"
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    with (
        llama_peer.LlamaPeer(Path("model.gguf"), 2, "wall", program=path) as peer,
        pytest.raises(SystemExit, match="llama_rate ended"),
    ):
        peer.choose(["decode32"])
