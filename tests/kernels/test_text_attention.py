# SPDX-License-Identifier: Apache-2.0
"""rope_kv and both attentions: head sizes, shared KV heads, positions, the ends of the context."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.backends import cpu
from tests.kernels.harness import Runner

Array = npt.NDArray[Any]
SHAPES = [
    (4, 4, 32), (9, 3, 64), (6, 1, 80), (3, 1, 96), (8, 2, 128), (2, 1, 256), (5, 5, 36), (3, 3, 4)
]  # fmt: skip
Push = dict[str, float | int]


def caches(
    kv_heads: int, ctx: int, dim: int, first: int, filled: int, seed: int
) -> tuple[Array, Array]:
    """K and V with NaN, which nobody may look at, before position `first` and from `filled` on."""
    rng = np.random.default_rng(seed)
    pair = rng.normal(size=(2, kv_heads, ctx, dim)).astype(np.float16)
    pair[:, :, :first] = np.nan
    pair[:, :, filled:] = np.nan
    return pair[0], pair[1]


def attention(
    shape: tuple[int, int, int],
    ctx: int,
    pos0: int,
    tokens: int,
    chunk: int,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Push, dict[str, Array]]:
    heads, kv_heads, dim = shape
    first = max(0, pos0 + 1 - window) if window else 0
    kc, vc = caches(kv_heads, ctx, dim, first, pos0 + tokens, seed=heads * dim + pos0)
    rng = np.random.default_rng(tokens)
    qkv = rng.normal(size=(chunk, heads + 2 * kv_heads, dim)).astype(np.float32) * 2
    out = np.full((chunk, heads, dim), np.nan, np.float32)
    push: Push = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "ctx": ctx}
    push |= {"scale": float(np.float32(dim**-0.5)), "window": window, "softcap": softcap}
    return push, {"qkv": qkv, "kc": kc, "vc": vc, "out": out}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pos0", [0, 1, 31, 32, 63, 64, 199, 255, 256, 299])
def test_decode(runner: Runner, shape: tuple[int, int, int], pos0: int) -> None:
    push, arrays = attention(shape, 300, pos0, 1, 1)
    for variant in runner.variants("attention_decode", "base"):
        given = (1, pos0)
        runner.check_op("attention_decode", variant, push, arrays, params=given, tolerance=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("pos0", "tokens"), [(0, 1), (0, 33), (5, 3), (31, 17), (70, 30)])
def test_prefill(runner: Runner, shape: tuple[int, int, int], pos0: int, tokens: int) -> None:
    push, arrays = attention(shape, 100, pos0, tokens, 36)
    for variant in runner.variants("attention_prefill", "base"):
        given = (tokens, pos0, 0)
        got = runner.check_op("attention_prefill", variant, push, arrays, given, 36, 2e-5)
        assert np.isnan(got["out"][tokens:]).all()


@pytest.mark.parametrize("shape", [(9, 3, 64), (2, 1, 256), (5, 5, 36)])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (0, 3.0), (40, 0.0), (33, 20.0)])
@pytest.mark.parametrize("pos0", [0, 39, 70])
def test_window_and_soft_cap(
    runner: Runner, shape: tuple[int, int, int], window: int, softcap: float, pos0: int
) -> None:
    for op, tokens in (("attention_decode", 1), ("attention_prefill", 25)):
        push, arrays = attention(shape, 100, pos0, tokens, tokens, window, softcap)
        for variant in runner.variants(op, "base"):
            given = (tokens, pos0, 0)
            runner.check_op(op, variant, push, arrays, given, tokens, tolerance=2e-5)


@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_great_scores_do_not_overflow(runner: Runner, softcap: float) -> None:
    push, arrays = attention((4, 2, 64), 80, 40, 8, 8, softcap=softcap)
    arrays["qkv"] *= 200
    for op, params in (("attention_prefill", (8, 40)), ("attention_decode", (1, 47))):
        for variant in runner.variants(op, "base"):
            runner.check_op(op, variant, push, arrays, params, tokens=8, tolerance=1e-3)


def test_decode_is_the_same_on_any_number_of_threads() -> None:
    push, arrays = attention((9, 3, 64), 300, 299, 1, 1)
    results = []
    for threads in (1, 2, 7):
        backend = cpu.CpuBackend(threads=threads)
        results.append(
            Runner(backend).run("attention_decode", "base", push, arrays, params=(1, 299))["out"]
        )
        backend.close()
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("neox", [0, 1])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rope_dims"),
    [(9, 3, 64, 64), (4, 4, 32, 32), (2, 1, 80, 32), (8, 2, 128, 128), (1, 1, 36, 28)],
)
@pytest.mark.parametrize(("pos0", "tokens"), [(0, 1), (7, 5), (20, 12)])
def test_rope(
    runner: Runner,
    heads: int,
    kv_heads: int,
    dim: int,
    rope_dims: int,
    neox: int,
    pos0: int,
    tokens: int,
) -> None:
    rng = np.random.default_rng(dim + pos0)
    ctx, chunk = 32, 16
    angle = np.arange(ctx)[:, None] * 10000.0 ** (-np.arange(rope_dims // 2) / (rope_dims // 2))
    table = np.stack([np.cos(angle), np.sin(angle)], axis=2).astype(np.float32)
    qkv = rng.normal(size=(chunk, heads + 2 * kv_heads, dim)).astype(np.float32)
    kc, vc = np.full((2, kv_heads, ctx, dim), -7, np.float16)
    push = {
        "heads": heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "ctx": ctx,
        "rope_dims": rope_dims,
        "neox": neox,
    }
    arrays = {"qkv": qkv, "table": table, "kc": kc, "vc": vc}
    # A half of the cache may be rounded either way where the sums differ in their last bit.
    got = runner.check_op(
        "rope_kv", "base", push, arrays, params=(tokens, pos0), tokens=chunk, tolerance=1e-3
    )
    heads_of_q = got["qkv"][:tokens, :heads]
    assert (
        np.abs(heads_of_q[..., rope_dims:] - qkv[:tokens, :heads, rope_dims:]).max(initial=0) == 0
    )
    np.testing.assert_allclose(
        np.linalg.norm(heads_of_q, axis=2), np.linalg.norm(qkv[:tokens, :heads], axis=2), rtol=1e-5
    )
    if pos0 == 0:
        np.testing.assert_allclose(got["qkv"][0], qkv[0], rtol=1e-6)
    assert (got["kc"][:, pos0 + tokens :] == -7).all()
    assert (got["vc"][:, :pos0] == -7).all()


def test_a_cache_holds_the_nearest_half(runner: Runner) -> None:
    values = np.array([1e-8, 3e-8, 6e-5, 6.1e-5, -2.0001, 65504, -1e-7, 0.333333], np.float32)
    qkv = np.zeros((1, 3, 8), np.float32)
    qkv[0, 2] = values
    table = np.zeros((4, 4, 2), np.float32)
    kc, vc = np.zeros((2, 1, 4, 8), np.float16)
    push = {"heads": 1, "kv_heads": 1, "dim": 8, "ctx": 4, "rope_dims": 8, "neox": 0}
    arrays = {"qkv": qkv, "table": table, "kc": kc, "vc": vc}
    got = runner.run("rope_kv", "base", push, arrays, params=(1, 2))["vc"][0, 2]
    if runner.backend.info.kind == "cpu":
        np.testing.assert_array_equal(got, values.astype(np.float16))
    else:  # Vulkan leaves the direction of rounding to the device
        np.testing.assert_allclose(got.astype(np.float32), values, rtol=1e-3, atol=6e-8)
