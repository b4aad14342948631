# SPDX-License-Identifier: Apache-2.0
"""rope_kv and both attentions: head sizes, shared KV heads, positions, the ends of the context."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kernels
from engine.backends import cpu
from kernels import kv
from kernels.contract import FORMATS
from tests.kernels.harness import Runner, reference

Array = npt.NDArray[Any]
SHAPES = [
    (4, 4, 32), (9, 3, 64), (6, 1, 80), (3, 1, 96), (8, 2, 128), (2, 1, 256), (5, 5, 36), (3, 3, 4)
]  # fmt: skip
Push = dict[str, float | int]


def within(op: str, variant: str) -> float:
    """How far a variant may be off: one that multiplies halves more than float32."""
    return 5e-3 if kernels.op(op).variant(variant).rounds else 2e-5


def caches(
    fmt: str, kv_heads: int, ctx: int, dim: int, first: int, filled: int, seed: int
) -> tuple[Array, Array]:
    """K and V with NaN, which nobody may look at, before position `first` and from `filled` on."""
    rng = np.random.default_rng(seed)
    pair = rng.normal(size=(2, kv_heads, ctx, dim)).astype(np.float16)
    if fmt == "f16":
        hidden = pair
    else:
        whole = [kv.quantise(one) for one in pair]
        hidden = np.stack([scales for _, scales in whole])
    hidden[:, :, :first] = np.nan
    hidden[:, :, filled:] = np.nan
    if fmt == "f16":
        return pair[0], pair[1]
    first_, second = (
        np.concatenate([data.reshape(-1).view(np.uint8), scales.reshape(-1).view(np.uint8)])
        for (data, _), scales in zip(whole, hidden, strict=True)
    )
    return first_, second


def attention(
    fmt: str,
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
    kc, vc = caches(fmt, kv_heads, ctx, dim, first, pos0 + tokens, seed=heads * dim + pos0)
    rng = np.random.default_rng(tokens)
    qkv = rng.normal(size=(chunk, heads + 2 * kv_heads, dim)).astype(np.float32) * 2
    out = np.full((chunk, heads, dim), np.nan, np.float32)
    push: Push = {"fmt": FORMATS[fmt], "heads": heads, "kv_heads": kv_heads}
    push |= {"dim": dim, "ctx": ctx}
    push |= {"scale": float(np.float32(dim**-0.5)), "window": window, "softcap": softcap}
    return push, {"qkv": qkv, "kc": kc, "vc": vc, "out": out}


@pytest.mark.parametrize("fmt", kv.FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pos0", [0, 31, 32, 63, 64, 199, 256, 299])
def test_decode(runner: Runner, fmt: str, shape: tuple[int, int, int], pos0: int) -> None:
    push, arrays = attention(fmt, shape, 300, pos0, 1, 1)
    for variant in runner.variants("attention_decode", fmt):
        given = (1, pos0)
        runner.check_op(
            "attention_decode", variant, push, arrays, given, 1, within("attention_decode", variant)
        )


@pytest.mark.parametrize("fmt", kv.FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("pos0", "tokens"), [(0, 1), (0, 33), (5, 3), (31, 17), (70, 30)])
def test_prefill(
    runner: Runner, fmt: str, shape: tuple[int, int, int], pos0: int, tokens: int
) -> None:
    push, arrays = attention(fmt, shape, 100, pos0, tokens, 36)
    for variant in runner.variants("attention_prefill", fmt):
        given = (tokens, pos0, 0)
        got = runner.check_op(
            "attention_prefill",
            variant,
            push,
            arrays,
            given,
            36,
            within("attention_prefill", variant),
        )
        assert np.isnan(got["out"][tokens:]).all()


@pytest.mark.parametrize("fmt", kv.FORMATS)
@pytest.mark.parametrize("shape", [(9, 3, 64), (2, 1, 256), (5, 5, 36)])
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (0, 3.0), (40, 0.0), (33, 20.0)])
@pytest.mark.parametrize("pos0", [0, 39, 70])
def test_window_and_soft_cap(
    runner: Runner, fmt: str, shape: tuple[int, int, int], window: int, softcap: float, pos0: int
) -> None:
    for op, tokens in (("attention_decode", 1), ("attention_prefill", 25)):
        push, arrays = attention(fmt, shape, 100, pos0, tokens, tokens, window, softcap)
        for variant in runner.variants(op, fmt):
            given = (tokens, pos0, 0)
            runner.check_op(op, variant, push, arrays, given, tokens, within(op, variant))


@pytest.mark.parametrize("fmt", kv.FORMATS)
@pytest.mark.parametrize(("shape", "ctx"), [((5, 1, 64), 4200), ((1, 1, 32), 34_000)])
def test_decode_far_from_the_start(
    runner: Runner, fmt: str, shape: tuple[int, int, int], ctx: int
) -> None:
    push, arrays = attention(fmt, shape, ctx, ctx - 7, 1, 1)
    for variant in runner.variants("attention_decode", fmt):
        given = (1, ctx - 7)
        runner.check_op(
            "attention_decode", variant, push, arrays, given, 1, within("attention_decode", variant)
        )


def test_calls_find_their_scratch_memory_as_they_left_it(runner: Runner) -> None:
    """Slices after one another, and calls of one slice that take turns with it."""
    push, arrays = attention("f16", (4, 2, 32), 200, 199, 1, 1)
    for variant in runner.variants("attention_decode", "f16"):
        first = runner.run("attention_decode", variant, push, arrays, (1, 199), times=1)
        again = runner.run("attention_decode", variant, push, arrays, (1, 199), times=9)
        np.testing.assert_array_equal(first["out"], again["out"])


@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_great_scores_do_not_overflow(runner: Runner, softcap: float) -> None:
    push, arrays = attention("f16", (4, 2, 64), 80, 40, 8, 8, softcap=softcap)
    arrays["qkv"] *= 200
    for op, params in (("attention_prefill", (8, 40)), ("attention_decode", (1, 47))):
        for variant in runner.variants(op, "f16"):
            runner.check_op(op, variant, push, arrays, params, tokens=8, tolerance=1e-3)


def test_decode_is_the_same_on_any_number_of_threads() -> None:
    push, arrays = attention("f16", (9, 3, 64), 300, 299, 1, 1)
    results = []
    for threads in (1, 2, 7):
        backend = cpu.CpuBackend(threads=threads)
        results.append(
            Runner(backend).run("attention_decode", "f16", push, arrays, params=(1, 299))["out"]
        )
        backend.close()
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("fmt", kv.FORMATS)
@pytest.mark.parametrize("neox", [0, 1])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rope_dims"),
    [(9, 3, 64, 64), (4, 4, 32, 32), (2, 1, 80, 32), (8, 2, 128, 128), (1, 1, 36, 28)],
)
@pytest.mark.parametrize(("pos0", "tokens"), [(0, 1), (7, 5), (20, 12)])
def test_rope(
    runner: Runner,
    fmt: str,
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
    kc, vc = np.full((2, kv.nbytes(fmt, kv_heads, ctx, dim)), 0x55, np.uint8)
    push: Push = {"fmt": FORMATS[fmt], "heads": heads, "kv_heads": kv_heads}
    push |= {"dim": dim, "ctx": ctx, "rope_dims": rope_dims, "neox": neox}
    arrays: dict[str, Array] = {"qkv": qkv, "table": table, "kc": kc, "vc": vc}
    want = reference("rope_kv", push, arrays, (tokens, pos0), chunk)
    here = range(pos0, pos0 + tokens)
    others = [p for p in range(ctx) if p not in here]
    for variant in runner.variants("rope_kv", fmt):
        got = runner.run("rope_kv", variant, push, arrays, (tokens, pos0), chunk)
        np.testing.assert_allclose(got["qkv"], want["qkv"], 1e-5, 1e-5)
        for name in ("kc", "vc"):
            # An element may be rounded either way where the sums differ in their last bit.
            a, b, before = (
                kv.load(fmt, x[name], (kv_heads, ctx, dim)) for x in (got, want, arrays)
            )
            step = 1e-3 if fmt == "f16" else np.abs(b[:, here]).max() / 127
            np.testing.assert_allclose(a[:, here], b[:, here], 1e-3, step)
            np.testing.assert_array_equal(a[:, others], before[:, others])
            assert (np.abs(a[:, here] - b[:, here]) > 1e-3).mean() < 0.01
        heads_of_q = got["qkv"][:tokens, :heads]
        before_q = qkv[:tokens, :heads]
        assert np.abs(heads_of_q - before_q)[..., rope_dims:].max(initial=0) == 0
        lengths = np.linalg.norm(heads_of_q, axis=2)
        np.testing.assert_allclose(lengths, np.linalg.norm(before_q, axis=2), rtol=1e-5)
        if pos0 == 0:
            np.testing.assert_allclose(got["qkv"][0], qkv[0], rtol=1e-6)


def _values(runner: Runner, fmt: str, values: Array, variant: str) -> Array:
    """What a cache has of a row."""
    dim = len(values)
    qkv = np.zeros((1, 3, dim), np.float32)
    qkv[0, 2] = values
    table = np.zeros((4, dim // 2, 2), np.float32)
    kc, vc = np.zeros((2, kv.nbytes(fmt, 1, 4, dim)), np.uint8)
    push: Push = {"fmt": FORMATS[fmt], "heads": 1, "kv_heads": 1, "dim": dim, "ctx": 4}
    push |= {"rope_dims": dim, "neox": 0}
    arrays: dict[str, Array] = {"qkv": qkv, "table": table, "kc": kc, "vc": vc}
    got = runner.run("rope_kv", variant, push, arrays, params=(1, 2))["vc"]
    found: Array = kv.load(fmt, got, (1, 4, dim))[0, 2]
    return found


def test_a_cache_holds_the_nearest_half(runner: Runner) -> None:
    values = np.array([1e-8, 3e-8, 6e-5, 6.1e-5, -2.0001, 65504, -1e-7, 0.333333], np.float32)
    for variant in runner.variants("rope_kv", "f16"):
        got = _values(runner, "f16", values, variant)
        if runner.backend.info.kind == "gpu":  # Vulkan leaves the direction of rounding to it
            np.testing.assert_allclose(got, values, rtol=1e-3, atol=6e-8)
        else:
            np.testing.assert_array_equal(got, values.astype(np.float16))


@pytest.mark.parametrize("dim", [4, 36, 96, 256])
@pytest.mark.parametrize("size", [0.0, 1e-6, 0.3, 1000.0])
def test_q8_is_off_by_half_a_step(runner: Runner, dim: int, size: float) -> None:
    values = (np.random.default_rng(dim).normal(size=dim) * size).astype(np.float32)
    pad = np.pad(np.abs(values), (0, -dim % kv.BLOCK)).reshape(-1, kv.BLOCK)
    step = np.repeat(np.maximum(pad.max(axis=1) / 127 * (1 + 2**-10), 2.0**-14), kv.BLOCK)[:dim]
    for variant in runner.variants("rope_kv", "q8"):
        error = np.abs(_values(runner, "q8", values, variant) - values)
        assert (error <= 0.501 * step).all()


@pytest.mark.parametrize(
    ("shape", "rope_dims", "neox"),
    [((9, 3, 64), 64, 0), ((8, 1, 128), 128, 1), ((6, 2, 80), 40, 1), ((3, 3, 8), 8, 0),
     ((5, 1, 64), 32, 0)],
)  # fmt: skip
@pytest.mark.parametrize("pos0", [0, 1, 31, 33, 130, 299, 1100])
def test_step(
    runner: Runner, shape: tuple[int, int, int], rope_dims: int, neox: int, pos0: int
) -> None:
    """Rotation and attention of a token, in spans where positions are many, twice in a row."""
    ctx = pos0 + 3
    for window, softcap in ((0, 0.0), (40, 3.0)):
        push, arrays = attention("f16", shape, ctx, pos0, 0, 1, window, softcap)
        arrays["qkv"] = arrays["qkv"][0]
        del arrays["out"]
        angle = np.random.default_rng(pos0).normal(size=(ctx, rope_dims // 2))
        arrays["table"] = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
        push |= {"rope_dims": rope_dims, "neox": neox}
        for variant in runner.variants("attention_step", "f16"):
            runner.check_op(
                "attention_step", variant, push, arrays, params=(1, pos0), tolerance=2e-3
            )


@pytest.mark.gpu
def test_a_step_leaves_its_scratch_as_it_was(gpu: Runner) -> None:
    """Where nothing depends on Q, which each call writes over, all calls give the same."""
    push, arrays = attention("f16", (9, 3, 64), 1200, 1100, 0, 1)
    arrays["qkv"], ctx = arrays["qkv"][0], 1200
    del arrays["out"]
    arrays["table"] = np.stack([np.ones((ctx, 32)), np.zeros((ctx, 32))], -1).astype(np.float32)
    push |= {"rope_dims": 64, "neox": 0, "scale": 0.0}
    for variant in gpu.variants("attention_step", "f16"):
        once = gpu.run("attention_step", variant, push, arrays, params=(1, 1100))
        often = gpu.run("attention_step", variant, push, arrays, params=(1, 1100), times=9)
        np.testing.assert_array_equal(once["qkv"], often["qkv"])
