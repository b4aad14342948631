# SPDX-License-Identifier: Apache-2.0
"""What only some models have: biases, norms of heads, soft caps, routers and experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels import weights
from kernels.contract import FORMATS
from tests.kernels.harness import Runner


@pytest.mark.parametrize("n", [4, 64, 260])
def test_add_bias(runner: Runner, n: int) -> None:
    rng = np.random.default_rng(n)
    y = rng.normal(size=(5, n)).astype(np.float32)
    arrays = {"b": rng.normal(size=n).astype(np.float32), "y": y}
    got = runner.check_op("add_bias", "base", {"n": n}, arrays, params=(3,), tokens=5)["y"]
    np.testing.assert_array_equal(got[3:], y[3:])


@pytest.mark.parametrize("n", [4, 64, 260])
@pytest.mark.parametrize("count", [1, 3])
def test_last_to_first(runner: Runner, n: int, count: int) -> None:
    x = np.random.default_rng(n).normal(size=(5, n)).astype(np.float32)
    got = runner.check_op("last_to_first", "base", {"n": n}, {"x": x}, params=(count,), tokens=5)
    np.testing.assert_array_equal(got["x"].reshape(5, n), [x[count - 1], *x[1:]])


@pytest.mark.parametrize("n", [4, 64, 260])
def test_row_gate(runner: Runner, n: int) -> None:
    rng = np.random.default_rng(n)
    y = rng.normal(size=(7, n)).astype(np.float32)
    g = np.asarray([0.3, -2, 5, 200, -200, 0, 0], np.float32)
    arrays = {"g": g, "y": y}
    got = runner.check_op("row_gate", "base", {"n": n}, arrays, params=(5,), tokens=7)["y"]
    np.testing.assert_array_equal(got[5:], y[5:])
    np.testing.assert_array_equal(got[3], y[3])


@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 1, 100), (1, 1, 4)])
def test_head_norm(runner: Runner, heads: int, kv_heads: int, dim: int, whole: int) -> None:
    rng = np.random.default_rng(dim)
    qkv = rng.normal(size=(4, (heads + 2 * kv_heads) * dim)).astype(np.float32) * 9
    qkv[0] *= 1e-4
    size = (heads + kv_heads) * dim if whole else 2 * dim
    arrays = {"w": rng.normal(size=size).astype(np.float32), "qkv": qkv}
    push = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "eps": 1e-6, "whole": whole}
    got = runner.check_op("head_norm", "base", push, arrays, params=(3,), tokens=4)["qkv"]
    np.testing.assert_array_equal(got[3], qkv[3])
    np.testing.assert_array_equal(got[:, -kv_heads * dim :], qkv[:, -kv_heads * dim :])


@pytest.mark.parametrize("n", [1, 63, 1000])
def test_softcap(runner: Runner, n: int) -> None:
    x = np.random.default_rng(n).normal(size=n).astype(np.float32) * 60
    x[:1] = 1e30
    got = runner.check_op("softcap", "base", {"n": n, "cap": 30.0}, {"x": x}, tolerance=1e-4)["x"]
    assert np.abs(got).max() <= 30


@pytest.mark.parametrize(("experts", "used"), [(4, 2), (8, 8), (64, 8), (130, 6), (1, 1)])
@pytest.mark.parametrize("norm", [0, 1])
def test_route(runner: Runner, experts: int, used: int, norm: int) -> None:
    logits = np.random.default_rng(experts).normal(size=(5, experts)).astype(np.float32) * 3
    logits[1] = np.round(logits[1])  # equals: the lower id comes first
    arrays = {"logits": logits, "out": np.full((5, used, 2), 0x7FC00000, np.uint32)}
    push = {"experts": experts, "used": used, "norm": norm}
    order = np.argsort(-logits[:3], axis=1, kind="stable")[:, :used]
    share = np.exp(logits[:3].astype(np.float64))
    chosen = np.take_along_axis(share, order, 1)
    chosen /= (chosen if norm else share).sum(axis=1, keepdims=True)
    for variant in runner.variants("route", "base"):
        got = runner.run("route", variant, push, arrays, params=(3,), tokens=5)["out"]
        assert (got[3:] == 0x7FC00000).all()
        np.testing.assert_array_equal(got[:3, :, 0], order)
        shares = np.ascontiguousarray(got[:3, :, 1]).view(np.float32)
        np.testing.assert_allclose(shares, chosen, rtol=1e-5)


@pytest.mark.parametrize("fmt", ["q4", "q8", "f16"])
@pytest.mark.parametrize("add", [0, 1])
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 32, 64), (3, 48, 288)])
def test_experts(runner: Runner, fmt: str, add: int, tokens: int, n: int, k: int) -> None:
    """Experts 2..5 of 8; of three a token some are in other shards."""
    rng = np.random.default_rng(n)
    count, used, first = 4, 3, 2
    w = weights.pack(fmt, rng.normal(size=(count * n, k)).astype(np.float32))
    route: Any = np.zeros((tokens + 1, used, 2), np.uint32)
    route[:, :, 0] = [rng.permutation(8)[:used] for _ in range(tokens + 1)]
    route[0, :, 0] = [4, 7, 2]
    route[:, :, 1] = rng.random((tokens + 1, used), np.float32).view(np.uint32)
    rows = (tokens + 1) * used
    # What a CPU that rounds activations to int8 rounds to themselves.
    x = rng.integers(-127, 128, (rows if add else tokens + 1, k)).astype(np.float32) / 64
    x[:, ::32] = 127 / 64
    y = rng.normal(size=(tokens + 1 if add else rows, n + 6)).astype(np.float32)
    push = {"fmt": FORMATS[fmt], "n": n, "k": k, "first": first, "count": count, "used": used}
    push |= {"sum": add, "y0": 3, "ldy": n + 6}
    arrays = {"w": w, "x": x, "route": route, "y": y}
    given = (tokens, 0, tokens - 1)
    got = runner.check_op(
        "experts", fmt, push, arrays, params=given, tokens=tokens + 1, tolerance=(2e-3, 1e-5)
    )["y"]
    np.testing.assert_array_equal(got[:, :3], y[:, :3])
    np.testing.assert_array_equal(got[:, 3 + n :], y[:, 3 + n :])
    after = tokens if add else tokens * used
    np.testing.assert_array_equal(got[after:], y[after:])


@pytest.mark.parametrize("fmt", ["q4", "q8", "f16"])
@pytest.mark.parametrize("add", [0, 1])
def test_experts_with_many_tokens(runner: Runner, fmt: str, add: int) -> None:
    """Experts that none, one, a few and most of the tokens have chosen."""
    rng = np.random.default_rng(7)
    tokens, n, k, count, used = 29, 32, 96, 9, 2
    w = weights.pack(fmt, rng.normal(size=(count * n, k)).astype(np.float32))
    route: Any = np.zeros((tokens, used, 2), np.uint32)
    route[:, 0, 0] = 4
    route[:, 1, 0] = [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, *[5] * 7, *[6] * 9, 8, 12]
    route[:, :, 1] = rng.random((tokens, used), np.float32).view(np.uint32)
    rows = tokens * used
    x = rng.integers(-127, 128, (rows if add else tokens, k)).astype(np.float32) / 64
    x[:, ::32] = 127 / 64
    y = rng.normal(size=(tokens if add else rows, n)).astype(np.float32)
    push = {"fmt": FORMATS[fmt], "n": n, "k": k, "first": 0, "count": count, "used": used}
    push |= {"sum": add, "y0": 0, "ldy": n}
    arrays = {"w": w, "x": x, "route": route, "y": y}
    runner.check_op(
        "experts", fmt, push, arrays, params=(tokens,), tokens=tokens, tolerance=(2e-3, 1e-5)
    )
