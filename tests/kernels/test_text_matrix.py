# SPDX-License-Identifier: Apache-2.0
"""matvec, matmul and embed in every weight format, on every instruction set and the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kernels
from engine.backends import cpu
from kernels import weights
from kernels.contract import FORMATS
from kernels.matmul.op import tile
from kernels.swiglu.op import gated
from tests.kernels.harness import Runner

FMTS = ["q4", "q8", "f16"]
Floats = npt.NDArray[Any]


def random_weights(fmt: str, n: int, k: int, seed: int) -> weights.Words:
    """Any bits that an importer may bring, -128 and negative scales too."""
    rng = np.random.default_rng(seed)
    scale, low = (rng.normal(size=(n, k // 32)).astype(np.float16) for _ in range(2))
    if fmt == "f16":
        return weights.pack_f16(rng.normal(size=(n, k)))
    if fmt == "q8":
        return weights.pack_q8_parts(scale, rng.integers(-128, 128, (n, k)).astype(np.int8))
    return weights.pack_q4_parts(scale, low, rng.integers(0, 16, (n, k), dtype=np.uint8))


def rounded(x: Floats) -> tuple[Floats, Floats]:
    """Activations as the CPU rounds them (kernels/include/weights.h), and half a step for each
    element."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    q = np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    return (q * step).reshape(x.shape), (blocks * 0 + step).reshape(x.shape) / 2


def product(
    runner: Runner,
    op: str,
    fmt: str,
    n: int,
    k: int,
    tokens: int,
    *,
    variant: str = "",
    **more: int,
) -> tuple[Floats, Floats]:
    """Runs matvec or matmul into a y of NaN (or numbers, to add to); checks it and gives y before
    and after."""
    rng = np.random.default_rng(n * 7 + k + tokens)
    chunk = more.pop("chunk", tokens)
    ldy = more.pop("ldy", n)
    push = {"fmt": FORMATS[fmt], "n": n, "k": k, "accumulate": 0, "y0": 0, **more}
    if op == "matmul":
        push["ldy"] = ldy
    packed = random_weights(fmt, n, k, seed=n + k)
    x = rng.normal(size=(chunk, k)).astype(np.float32)
    x[0, : k // 2] *= 30
    x[-1, :32] = 0
    y = rng.normal(size=(chunk, ldy)).astype(np.float32)
    if not push["accumulate"]:
        y[:] = np.nan
    arrays = {"w": packed, "x": x, "y": y}
    given = (tokens, 0, 0)
    got = runner.run(op, variant or fmt, push, arrays, params=given, tokens=chunk)["y"]

    w = weights.unpack(fmt, packed, n, k).astype(np.float64)
    used, y0 = x[:tokens].astype(np.float64), push["y0"]
    want = y.astype(np.float64)
    window = want[:tokens, y0 : y0 + n]
    base = window.copy() if push["accumulate"] else 0.0
    size = np.abs(used) @ np.abs(w).T  # what float32 sums may be wrong by is a part of it
    int8 = fmt != "f16" and runner.backend.info.kind != "gpu"
    needs = kernels.op(op).variant(variant or fmt).needs
    if not int8 and "int_dot" not in needs:
        window[:] = base + used @ w.T
        bound = (1e-3 if "fp16" in needs else 2e-6) * size
    else:
        step_sum, step = rounded(used)
        window[:] = base + step_sum @ w.T
        # Against the rounded activations all is exact but for a tie here and there; against the
        # true ones the error is at most half a step for each, and far less in sum.
        bound = 2e-6 * size + 1e-3 * step @ np.abs(w).T
        true_error = np.abs(window - base - used @ w.T)
        assert (true_error <= step @ np.abs(w).T + 1e-9).all()
    outside = np.ones(y.shape, bool)
    outside[:tokens, y0 : y0 + n] = False
    np.testing.assert_array_equal(got[outside], y[outside], "wrote outside of its rows and tokens")
    error = np.abs(got[:tokens, y0 : y0 + n] - window)
    assert (error <= bound + 1e-5).all(), f"off by {error.max()} (allowed {bound.min()})"
    return y, got


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 32), (16, 64), (37, 96), (130, 576), (64, 1536), (469, 64)]
)
def test_matvec(runner: Runner, fmt: str, n: int, k: int) -> None:
    for variant in runner.variants("matvec", fmt):
        product(runner, "matvec", fmt, n, k, 1, variant=variant)


@pytest.mark.parametrize("fmt", FMTS)
def test_matvec_adds_and_leaves_the_rest(runner: Runner, fmt: str) -> None:
    for v in runner.variants("matvec", fmt):
        product(runner, "matvec", fmt, 45, 128, 1, accumulate=1, y0=64, ldy=160, variant=v)
        product(runner, "matvec", fmt, 45, 128, 1, accumulate=0, y0=16, ldy=90, variant=v)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize(("n", "k"), [(20, 8192 + 96), (20, 16384 + 96), (16 * 1290 + 5, 64)])
def test_matvec_in_chunks_and_of_several_tiles(gpu: Runner, fmt: str, n: int, k: int) -> None:
    for variant in gpu.variants("matvec", fmt):
        product(gpu, "matvec", fmt, n, k, 1, variant=variant)


def taken(op: str, k: int, seed: int) -> tuple[dict[str, Floats], dict[str, float], Floats]:
    """Random bindings and push constants of a product that makes its activations, and those."""
    rng = np.random.default_rng(seed)
    if op == "matvec_norm":
        x, norm = rng.normal(size=(2, k)), rng.normal(size=k).astype(np.float32)
        arrays = {"x": x.astype(np.float32), "norm": norm}
        x = arrays["x"][1].astype(np.float64)
        return arrays, {"eps": 0.5}, x * norm / np.sqrt(np.mean(x**2) + 0.5)
    gu = (2 * rng.normal(size=2 * k)).astype(np.float32)
    gate, up = gu[:k].astype(np.float64), gu[k:]
    act = seed % 2
    z = 2 * (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3) if act else gate
    return {"gu": gu}, {"act": act}, gate / (1 + np.exp(-z)) * up


def gated_product(runner: Runner, variant: str, n: int, k: int, accumulate: int) -> None:
    """Runs matvec_norm_glu and compares with both products on their own."""
    fmt, op, up = variant.partition("_")[0], "matvec_norm_glu", (n + 15) // 16 * 16 + 16
    arrays, own, x = taken("matvec_norm", k, n + k)
    packed = random_weights(fmt, up + n, k, seed=n + k)
    y = np.random.default_rng(n).normal(size=n + 12).astype(np.float32)
    push = {"fmt": FORMATS[fmt], "n": n, "k": k, "accumulate": accumulate, "y0": 3, **own}
    push |= {"act": n % 2, "up": up}
    got = runner.run(op, variant, push, {"w": packed, **arrays, "y": y}, params=(1, 5, 1))["y"]
    w = weights.unpack(fmt, packed, up + n, k).astype(np.float64)
    gate, unit = w[:n] @ x, w[up:] @ x
    base = y[3 : 3 + n] if accumulate else 0.0
    needs = kernels.op(op).variant(variant).needs
    size = np.abs(w) @ np.abs(x)
    off = (1e-3 if "fp16" in needs else 1e-5) * size + 1e-5
    if "int_dot" in needs or (fmt != "f16" and runner.backend.info.kind != "gpu"):
        off += np.abs(w) @ rounded(x)[1]
    # act has no slope above 1.2, nor is it larger than its argument.
    bound = 1.2 * off[:n] * (np.abs(unit) + off[up:]) + np.abs(gate) * off[up:] + 1e-5
    error = np.abs(got[3 : 3 + n] - (gated(gate, unit, n % 2) + base))
    assert (error <= bound).all(), f"{variant} is off by {error.max()}"
    outside = np.r_[0:3, 3 + n : len(y)]
    np.testing.assert_array_equal(got[outside], y[outside], "wrote outside of its rows")


def made_product(
    runner: Runner, op: str, variant: str, n: int, k: int, accumulate: int, y0: int
) -> None:
    """Runs matvec_norm or matvec_glu and compares with the activations on their own."""
    fmt = variant.partition("_")[0]
    arrays, own, x = taken(op, k, n + k)
    packed = random_weights(fmt, n, k, seed=n + k)
    y = np.random.default_rng(n).normal(size=n + y0 + 9).astype(np.float32)
    push = {"fmt": FORMATS[fmt], "n": n, "k": k, "accumulate": accumulate, "y0": y0, **own}
    arrays = {"w": packed, **arrays, "y": y}
    got = runner.run(op, variant, push, arrays, params=(1, 5, 1), tokens=1)["y"]
    w = weights.unpack(fmt, packed, n, k).astype(np.float64)
    want = y.astype(np.float64)
    want[y0 : y0 + n] = w @ x + (want[y0 : y0 + n] if accumulate else 0)
    size = np.abs(w) @ np.abs(x)
    needs = kernels.op(op).variant(variant).needs
    bound = (1e-3 if "fp16" in needs else 1e-5) * size + 1e-5
    if "int_dot" in needs or (fmt != "f16" and runner.backend.info.kind != "gpu"):
        bound += np.abs(w) @ rounded(x)[1]
    outside = np.ones(len(y), bool)
    outside[y0 : y0 + n] = False
    np.testing.assert_array_equal(got[outside], y[outside], "wrote outside of its rows")
    error = np.abs(got - want)[y0 : y0 + n]
    assert (error <= bound).all(), f"{op}.{variant} is off by {error.max()}"


@pytest.mark.parametrize("op", ["matvec_norm", "matvec_glu"])
@pytest.mark.parametrize("fmt", FMTS)
def test_products_that_make_their_activations(runner: Runner, op: str, fmt: str) -> None:
    for variant in runner.variants(op, fmt):
        for n, k, accumulate in ((1, 32, 0), (37, 96, 1), (130, 576, 0), (64, 1536, 1)):
            made_product(runner, op, variant, n, k, accumulate, 3)


@pytest.mark.parametrize("fmt", FMTS)
def test_gates_with_their_units(runner: Runner, fmt: str) -> None:
    for variant in runner.variants("matvec_norm_glu", fmt):
        for n, k, accumulate in ((1, 32, 0), (37, 96, 1), (130, 576, 0), (64, 1536, 1)):
            gated_product(runner, variant, n, k, accumulate)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FMTS)
def test_gates_in_chunks_and_of_several_tiles(gpu: Runner, fmt: str) -> None:
    for variant in gpu.variants("matvec_norm_glu", fmt):
        for n, k in ((20, 8192 + 96), (16 * 1290 + 5, 64), (20, 16384 + 96)):
            gated_product(gpu, variant, n, k, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["matvec_norm", "matvec_glu"])
@pytest.mark.parametrize("fmt", FMTS)
def test_products_that_make_their_activations_in_chunks(gpu: Runner, op: str, fmt: str) -> None:
    for variant in gpu.variants(op, fmt):
        for n, k in ((20, 8192 + 96), (20, 16384 + 96), (16 * 1290 + 5, 64)):
            made_product(gpu, op, variant, n, k, 0, 0)


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 9, 16, 33])
def test_matmul(runner: Runner, fmt: str, tokens: int) -> None:
    for v in runner.variants("matmul", fmt):
        product(runner, "matmul", fmt, 37, 96, tokens, variant=v)


@pytest.mark.parametrize("fmt", FMTS)
def test_matmul_adds_and_leaves_the_rest(runner: Runner, fmt: str) -> None:
    for v in runner.variants("matmul", fmt):
        more = {"accumulate": 1, "y0": 64, "ldy": 160}
        product(runner, "matmul", fmt, 45, 128, 7, chunk=24, variant=v, **more)
        more = {"accumulate": 0, "y0": 16, "ldy": 50}
        product(runner, "matmul", fmt, 32, 64, 11, chunk=16, variant=v, **more)
        product(runner, "matmul", fmt, 200, 576, 17, chunk=32, variant=v)


@pytest.mark.parametrize("fmt", FMTS)
def test_matmul_of_several_tiles(runner: Runner, fmt: str) -> None:
    for v in runner.variants("matmul", fmt):
        product(runner, "matmul", fmt, 150, 64, 131, variant=v)


@pytest.mark.parametrize("fmt", FMTS)
def test_matvec_is_the_same_on_any_number_of_threads(fmt: str) -> None:
    rng, n = np.random.default_rng(9), 469  # 30 tiles: in six runs, with tiles left over, and alone
    arrays = {
        "w": random_weights(fmt, n, 256, 4),
        "x": rng.normal(size=256).astype(np.float32),
        "y": np.zeros(n, np.float32),
    }
    push = {"fmt": FORMATS[fmt], "n": n, "k": 256, "accumulate": 0, "y0": 0}
    results = []
    for threads in (1, 3, 8):
        backend = cpu.CpuBackend(threads=threads)
        results.append(Runner(backend).run("matvec", fmt, push, arrays)["y"])
        backend.close()
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("fmt", FMTS)
@pytest.mark.parametrize("isa", cpu.isas())
def test_a_token_is_multiplied_as_it_is_alone(fmt: str, isa: str) -> None:
    """Sessions are put together and prompts cut as it suits: not a bit may depend on that."""
    n, k, most = 37, 96, 150
    x = np.random.default_rng(3).normal(size=(most, k)).astype(np.float32)
    push = {"fmt": FORMATS[fmt], "n": n, "k": k, "accumulate": 1, "y0": 0, "ldy": n}
    packed = random_weights(fmt, n, k, seed=5)
    backend, before = cpu.CpuBackend(threads=3), cpu.isa()

    def rows(first: int, tokens: int) -> Floats:
        arrays = {"w": packed, "x": x[first : first + tokens], "y": np.ones((tokens, n), "f")}
        return Runner(backend, isa).run("matmul", fmt, push, arrays, (tokens, 0, 0), tokens)["y"]

    try:
        whole = rows(0, most)
        for tokens in (1, 2, 3, 4, 5, 8, 9, 17, 40, 131):
            for first in (0, most - tokens):
                got = rows(first, tokens)
                np.testing.assert_array_equal(got, whole[first : first + tokens], f"{tokens}")
    finally:
        cpu.set_isa(before)
        backend.close()


@pytest.mark.parametrize("fmt", FMTS)
def test_embed_takes_the_rows_of_its_shard(runner: Runner, fmt: str) -> None:
    n, k = 50, 96
    table = random_weights(fmt, n, k, seed=6)
    ids = np.array([16, 0, 15, 65, 66, 40, 0xFFFFFFFF, 17], np.uint32)
    out = np.full((8, k), np.nan, np.float32)
    push = {"fmt": FORMATS[fmt], "k": k, "row0": 16, "rows": n, "scale": 1.0}
    arrays = {"ids": ids, "table": table, "out": out}
    got = runner.check_op("embed", fmt, push, arrays, params=(6,), tokens=8)["out"]
    assert np.isnan(got[[1, 2, 4, 6, 7]]).all()
    w = weights.unpack(fmt, table, n, k)
    np.testing.assert_allclose(got[[0, 3, 5]], w[[0, 49, 24]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["matvec", "matmul"])
def test_no_axis_has_more_groups_than_a_device_allows(op: str) -> None:
    contract = kernels.op(op)
    n = 4_000_000
    for variant in contract.variants:
        push = {"fmt": 0, "n": n, "k": 32, "tokens": 100}
        x, y, z = contract.groups(push, variant)
        assert max(x, y, z) <= 65535
        if op == "matvec":
            direct = "DIRECT" in variant.defines  # its workgroups go on to other rows
            assert direct or x * y * 16 * (4 if variant.rounds else 1) >= n
        else:
            rows, tokens = tile(variant)
            assert x * rows >= n
            assert y * z * tokens >= 100


def test_direct_products_are_not_for_compilers_of_small_gpus() -> None:
    for op in ("matvec", "matvec_norm", "matvec_glu", "matvec_norm_glu"):
        direct = [v for v in kernels.op(op).variants if "DIRECT" in v.defines]
        assert direct
        assert all(v.needs >= {"fp16", "int_dot"} for v in direct)
