# SPDX-License-Identifier: Apache-2.0
"""rmsnorm, swiglu and topk on every instruction set and the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels.best.op import part_nbytes as best_part_nbytes
from kernels.swiglu.op import ACTS
from kernels.topk.op import RECORD_WORDS, TOP, part_nbytes
from tests.kernels.harness import Runner

Floats = npt.NDArray[np.float32]


@pytest.mark.parametrize("k", [32, 36, 96, 576, 2048, 5000])
@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_rmsnorm(runner: Runner, k: int, tokens: int) -> None:
    rng = np.random.default_rng(k)
    x = rng.normal(size=(8, k)).astype(np.float32) * 10
    x[0] *= 1e-4
    arrays = {
        "x": x,
        "w": rng.normal(size=k).astype(np.float32),
        "y": np.full((8, k), np.nan, np.float32),
    }
    for variant in runner.variants("rmsnorm", "base"):
        push = {"k": k, "eps": 1e-5, "last": 0, "add": 0}
        given = (tokens, 0, 0)
        got = runner.check_op("rmsnorm", variant, push, arrays, params=given, tokens=8)["y"]
        assert np.isnan(got[tokens:]).all()
        more = {**arrays, "y": got}
        runner.check_op("rmsnorm", variant, {**push, "add": 1}, more, params=given, tokens=8)
        push["last"] = 1
        given = (tokens, 0, 5)
        got = runner.check_op("rmsnorm", variant, push, arrays, params=given, tokens=8)["y"]
        assert np.isnan(got[1:]).all()


@pytest.mark.parametrize("f", [4, 60, 64, 100, 1536])
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_swiglu(runner: Runner, f: int, act: str) -> None:
    rng = np.random.default_rng(f)
    gu = rng.normal(size=(5, 2 * f)).astype(np.float32) * 8
    gu[0, :4] = [-1000, 1000, 0, -87.9]
    arrays = {"gu": gu, "h": np.full((5, f), np.nan, np.float32)}
    push = {"f": f, "act": ACTS[act], "each": 1}
    got = runner.check_op("swiglu", "base", push, arrays, params=(3,), tokens=5)["h"]
    assert np.isnan(got[3:]).all()
    # Two rows a token, of which there is one.
    arrays = {name: array[:4] for name, array in arrays.items()}
    got = runner.check_op("swiglu", "base", {**push, "each": 2}, arrays, params=(1,), tokens=2)["h"]
    assert np.isnan(got[2:]).all()


def top64(runner: Runner, logits: Floats) -> tuple[npt.NDArray[np.uint32], Floats, Floats]:
    """Ids, logits, (max, log-sum-exp) after both stages; each stage is checked against the
    reference."""
    v = len(logits)
    part = np.zeros(part_nbytes(v) // 4, np.uint32)
    arrays: dict[str, Any] = {
        "logits": logits,
        "part": part,
        "out": np.full(RECORD_WORDS, 0x7FC00000, np.uint32),
    }
    for stage in (0, 1):
        arrays = {**arrays, **_checked(runner, arrays, {"v": v, "stage": stage})}
    out = arrays["out"]
    records = out[: 2 * TOP].reshape(TOP, 2)
    return (
        records[:, 0].copy(),
        np.ascontiguousarray(records[:, 1]).view(np.float32),
        out[2 * TOP :].view(np.float32),
    )


def _checked(runner: Runner, arrays: dict[str, Any], push: dict[str, int]) -> dict[str, Any]:
    """Records have to be equal to the last bit, sums nearly."""
    from tests.kernels.harness import reference

    want = reference("topk", push, arrays)
    name = "out" if push["stage"] else "part"
    # The baseline comes last: its results are given back.
    for variant in reversed(runner.variants("topk", "base")):
        got = runner.run("topk", variant, push, arrays)
        a, b = (x[name].reshape(-1, RECORD_WORDS) for x in (got, want))
        np.testing.assert_array_equal(a[:, : 2 * TOP + 1], b[:, : 2 * TOP + 1], variant)
        np.testing.assert_allclose(
            a[:, 2 * TOP + 1].copy().view(np.float32),
            b[:, 2 * TOP + 1].copy().view(np.float32),
            rtol=1e-5,
            err_msg=variant,
        )
    return got


@pytest.mark.parametrize("v", [1, 63, 64, 65, 1023, 1024, 1025, 5000, 128_256])
def test_topk(runner: Runner, v: int) -> None:
    logits = np.random.default_rng(v).normal(size=v).astype(np.float32) * 5
    ids, values, (top, lse) = top64(runner, logits)
    order = np.argsort(-logits, kind="stable")[:TOP]
    np.testing.assert_array_equal(ids[: len(order)], order)
    np.testing.assert_array_equal(values[: len(order)], logits[order])
    assert (ids[len(order) :] == 0xFFFFFFFF).all()
    assert top == logits.max()
    exact = np.log(np.exp(logits.astype(np.float64) - top).sum()) + top
    assert lse == pytest.approx(exact, abs=1e-4)


def test_topk_takes_the_lower_id_of_equals(runner: Runner) -> None:
    for v, greatest in ((3000, 3), (100_000, 3), (100_000, 300)):
        logits = np.random.default_rng(4).integers(-3, greatest + 1, v).astype(np.float32)
        logits[logits == 0] = np.where(np.arange((logits == 0).sum()) % 2, 0.0, -0.0)
        ids, _, _ = top64(runner, logits)
        np.testing.assert_array_equal(ids, np.argsort(-logits, kind="stable")[:TOP])
    ids, _, _ = top64(runner, np.zeros(2000, np.float32))
    np.testing.assert_array_equal(ids, np.arange(TOP))
    zeros = np.where(np.arange(70) % 3, -0.0, 0.0).astype(np.float32)
    ids, _, _ = top64(runner, zeros)
    np.testing.assert_array_equal(ids, np.arange(TOP))


def test_topk_never_takes_nan_before_a_number(runner: Runner) -> None:
    logits = np.full(2100, np.nan, np.float32)
    logits[1::2] = -np.nan
    logits[[7, 1500, 2099]] = [-np.inf, 3.0, -1e30]
    ids, values, (top, _) = top64(runner, logits)
    assert list(ids[:4]) == [1500, 2099, 7, 0]
    assert np.isnan(values[3:]).all()
    assert top == 3.0
    logits[12] = np.inf
    ids, _, (top, _) = top64(runner, logits)
    assert list(ids[:2]) == [12, 1500]
    assert top == np.inf
    ids, values, (top, lse) = top64(runner, np.full(1100, np.nan, np.float32))
    np.testing.assert_array_equal(ids, np.arange(TOP))
    assert (top, lse) == (-np.inf, -np.inf)


@pytest.mark.parametrize("v", [1, 65, 1024, 5000, 128_256])
def test_best_is_the_first_of_topk(runner: Runner, v: int) -> None:
    rng = np.random.default_rng(v)
    odd = np.full(v, np.nan, np.float32)
    odd[::7] = -np.inf
    equal = np.zeros(v, np.float32)
    nothing = np.full(v, -np.nan, np.float32)
    for logits in (rng.normal(size=v).astype(np.float32) * 5, odd, equal, nothing):
        ids, values, sums = top64(runner, logits)
        for variant in runner.variants("best", "base"):
            part = np.zeros(best_part_nbytes(v) // 4, np.uint32)
            arrays = {"logits": logits, "part": part, "out": np.zeros(RECORD_WORDS, np.uint32)}
            for stage in (0, 1):
                arrays |= runner.run("best", variant, {"v": v, "stage": stage}, arrays)
            out = arrays["out"]
            assert out[0] == ids[0]
            np.testing.assert_array_equal(out[1:2].view(np.float32), values[:1])
            np.testing.assert_array_equal(out[2 : 2 * TOP : 2], 0xFFFFFFFF)
            np.testing.assert_array_equal(out[3 : 2 * TOP : 2].view(np.float32), -np.inf)
            np.testing.assert_allclose(out[2 * TOP :].view(np.float32), sums, rtol=1e-5)
