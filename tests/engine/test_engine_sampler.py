# SPDX-License-Identifier: Apache-2.0
"""Sampling against a plain implementation over whole distributions; settings; random numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.errors import DeviceLost, InvalidArgument
from engine.text.sampler import CANDIDATES, RECORD_BYTES, Candidates, sample, uniform
from engine.text.settings import Settings
from kernels import op


def record(logits: np.ndarray) -> np.ndarray:
    """What the device reads back for these logits, by the operation's own reference."""
    v = len(logits)
    topk = op("topk")
    part = np.zeros((-(-v // 1024)) * 130, np.uint32)
    out = np.zeros(130, np.uint32)
    buffers = {"logits": logits.astype(np.float32), "part": part, "out": out}
    for stage in (0, 1):
        topk.reference(np.zeros(16, np.uint32), buffers, {"v": v, "stage": stage})
    return out.view(np.uint8)


def plain(logits: np.ndarray, s: Settings) -> np.ndarray:
    """Probability of each id: top-k, top-p, min-p, temperature, over all logits, as one would write
    it down.
    """
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if s.top_k:
        order = order[: s.top_k]
    p = np.exp(logits[order] - logits[order].max())
    p /= p.sum()
    keep: list[int] = []
    total = 0.0
    for i, q in zip(order, p, strict=True):
        if s.top_p < 1 and keep and total >= s.top_p:
            break
        keep.append(i)
        total += q
    best = p[0]
    keep = [i for i, q in zip(order, p, strict=True) if i in keep and (q >= s.min_p * best)]
    out = np.zeros(len(logits))
    out[keep] = np.exp((logits[keep] - logits[keep].max()) / s.temperature)
    return out / out.sum()


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        ({}, False),
        ({"top_k": 1}, False),
        ({"top_k": 64, "min_p": 0.0, "top_p": 1.0, "temperature": 1.5}, False),
        ({"top_k": 0, "top_p": 0.6}, False),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.3}, False),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 0.7}, True),
        ({"top_k": 100, "top_p": 0.9}, True),
        ({"top_k": 0, "top_p": 0.9999, "min_p": 0.0}, True),
    ],
    ids=str,
)
def test_distribution(settings: dict[str, float], reads: bool) -> None:
    rng = np.random.default_rng(7)
    logits = rng.standard_normal(3000).astype(np.float32).astype(np.float64) * 2.5
    logits[rng.integers(0, 3000, 4)] += 7
    s = Settings.parse({"temperature": 0.8, **settings, "seed": 3})
    truth = plain(logits, s)
    best = Candidates.parse(record(logits))
    asked = []

    def everything() -> np.ndarray:
        asked.append(1)
        return logits.astype(np.float32)

    n = 3000
    got = np.zeros(3000)
    for position in range(n):
        got[sample(best, s, position, 3000, everything)] += 1 / n
    assert bool(asked) == reads
    assert np.abs(got - truth).sum() < 3 * math.sqrt(max(2, int(np.count_nonzero(truth))) / n)
    assert not got[truth == 0].any()


def test_greedy_takes_the_lower_id() -> None:
    logits = np.zeros(2000, np.float32)
    logits[[1999, 1500, 30]] = 4.0
    best = Candidates.parse(record(logits))
    assert sample(best, Settings(temperature=0), 0, 2000, lambda: logits) == 30
    assert best.top5()[:3] == [[30, 4.0], [1500, 4.0], [1999, 4.0]]


def test_a_vocabulary_smaller_than_the_record() -> None:
    logits = np.arange(10, dtype=np.float32)
    best = Candidates.parse(record(logits))
    assert len(best.ids) == 10
    s = Settings.parse({"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 50.0})

    def never() -> np.ndarray:
        raise AssertionError("the candidates are everything")

    assert {sample(best, s, i, 10, never) for i in range(300)} == set(range(10))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonsense_from_the_device(value: float) -> None:
    with pytest.raises(DeviceLost, match="no numbers"):
        Candidates.parse(record(np.full(500, value, np.float32)))
    with pytest.raises(DeviceLost):
        Candidates.parse(
            np.zeros(RECORD_BYTES, np.uint8).view(np.float32).__imul__(np.nan).view("u1")
        )


def test_random_numbers_depend_on_seed_and_position_alone() -> None:
    a = [uniform(1, i) for i in range(4000)]
    assert a == [uniform(1, i) for i in range(4000)]
    assert all(0 <= u < 1 for u in a)
    assert abs(np.mean(a) - 0.5) < 0.02
    counts, _ = np.histogram(a, 16, (0, 1))
    assert counts.min() > 180
    b = [uniform(2, i) for i in range(4000)]
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.06
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.06
    assert uniform((1 << 64) - 1, 0) != uniform(0, 0)


def test_settings() -> None:
    assert Settings.parse({}) == Settings(0.0, 40, 0.95, 0.05, 0, 256, (), False)
    assert Settings.parse({}, seed=9).seed == 9
    s = Settings.parse({"stop": "x", "temperature": 0, "device": "cpu", "top5": True})
    assert s.stop == ("x",)
    assert s.top5
    assert Settings.parse({"stop": ["a", "b"]}).stop == ("a", "b")


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 1.1},
        {"min_p": -1},
        {"seed": -1},
        {"seed": 1 << 64},
        {"max_tokens": 0},
        {"stop": [""]},
        {"stop": 5},
        {"stop": ["x" * 300]},
        {"stop": ["x"] * 40},
        {"top5": 1},
        {"temperatures": 1},
    ],
    ids=str,
)
def test_bad_settings(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=r"\.$"):
        Settings.parse(bad)


def test_the_record_is_what_the_kernel_writes() -> None:
    assert RECORD_BYTES == 520
    assert CANDIDATES == 64
