# SPDX-License-Identifier: Apache-2.0
"""The fastest variant is found by measurement, once, and used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kernels
from engine.backends import speed
from engine.backends.base import NOTHING, Lent, RunStats
from engine.backends.null import NullBackend
from engine.backends.vulkan import VulkanBackend
from engine.program import Program
from engine.variants import allowed, choose
from kernels.contract import FORMATS

NORM = {"k": 100, "eps": 1e-5, "last": 0, "add": 0}
SHAPES: dict[str, dict[str, float]] = {
    "rmsnorm": NORM,
    "matvec": {"fmt": FORMATS["q4"], "n": 50, "k": 96, "accumulate": 1, "y0": 3},
    "matvec_norm": {
        "fmt": FORMATS["q8"], "n": 50, "k": 96, "accumulate": 0, "y0": 3, "eps": 1e-5,
    },
    "matvec_glu": {"fmt": FORMATS["f16"], "n": 50, "k": 96, "accumulate": 1, "y0": 3, "act": 1},
    "matvec_norm_glu": {
        "fmt": FORMATS["q4"], "n": 50, "k": 96, "accumulate": 0, "y0": 3, "eps": 1e-5, "act": 1,
        "up": 64,
    },
    "matmul": {
        "fmt": FORMATS["q8"], "n": 50, "k": 96, "accumulate": 1, "y0": 3, "ldy": 60, "tokens": 9,
    },
    "topk": {"v": 3000, "stage": 0},
    "best": {"v": 3000, "stage": 1},
    "attention_decode": {
        "fmt": FORMATS["q8"], "heads": 4, "kv_heads": 2, "dim": 32, "ctx": 40, "scale": 0.1,
        "window": 9, "softcap": 0.0,
    },
    "attention_prefill": {
        "fmt": FORMATS["f16"], "heads": 4, "kv_heads": 2, "dim": 32, "ctx": 40, "scale": 0.1,
        "window": 9, "softcap": 0.0, "tokens": 13,
    },
}  # fmt: skip


@pytest.mark.parametrize(("op", "push"), SHAPES.items(), ids=list(SHAPES))
def test_a_trial_stands_for_a_class_of_sizes(op: str, push: dict[str, float]) -> None:
    made = speed.trial(op, push, 1 << 20)
    assert made is not None
    assert set(made.sizes) == {b.name for b in kernels.op(op).bindings}
    given = {**made.push, "tokens": made.params[0]}
    assert speed.trial(op, given, 1 << 20) == made
    names = [v.name for v in kernels.op(op).variants if v.baseline]
    assert list(speed.race(NullBackend(), names, made)) == names


@pytest.mark.parametrize("fmt", ["q4", "q8", "f16"])
def test_a_trial_fits_the_bindings(fmt: str) -> None:
    push = {"fmt": FORMATS[fmt], "n": 200_000, "k": 9000, "accumulate": 0, "y0": 0}
    for most in (1 << 20, 1 << 27):
        for op in ("matvec", "matmul"):
            made = speed.trial(op, {**push, "tokens": 5000}, most)
            assert made is not None
            assert max(made.sizes.values()) <= min(most, 64 << 20)
            assert (made.params[0] > 1) == (op == "matmul")
    attention = {"fmt": FORMATS["f16"], "heads": 8, "kv_heads": 8, "dim": 64, "ctx": 131072}
    for op in ("attention_decode", "attention_prefill"):
        made = speed.trial(op, {**attention, "tokens": 128}, 100_000)
        assert made is not None
        assert max(made.sizes.values()) <= 100_000
        assert made.params[0] + made.params[1] <= made.push["ctx"]
        assert (made.params[0] > 1) == (op == "attention_prefill")


def test_operations_with_nothing_to_choose_are_not_tried() -> None:
    assert speed.trial("swiglu", {"f": 64, "act": 0, "each": 1}, 1 << 20) is None


def test_the_baseline_gives_way_to_a_gain_alone() -> None:
    assert speed.best({"base": 1.0, "wide": 0.5, "wide_sub": 0.6}, "base") == "wide"
    assert speed.best({"base": 1.0, "wide": 0.98}, "base") == "base"
    assert speed.best({"wide": 1.0, "wide_sub": 0.99}, "base") == "wide_sub"
    assert speed.best({}, "base") == "base"


class Clock(NullBackend):
    """A device on which a call of a variant takes these seconds in turn, the last for good."""

    def __init__(self, times: dict[str, list[float]]) -> None:
        super().__init__()
        self.times = times
        self.ran: list[tuple[str, int]] = []  # variants, and calls of the chain
        self.info = replace(self.info, software=False)

    def executable(self, program: Program, weights: Any, lent: Lent = NOTHING) -> Any:
        exe: Any = super().executable(program, weights, lent)
        calls = program.sequences["chain"]

        def run(*sequences: str) -> RunStats:
            taken = self.times[calls[0].variant]
            self.ran.append((calls[0].variant, len(calls)))
            seconds = taken.pop(0) if len(taken) > 1 else taken[0]
            return RunStats(wall_s=9.0, device_s=seconds * len(calls))

        exe.run = run
        return exe


def test_variants_are_timed_in_turns_and_the_least_counts() -> None:
    made = speed.trial("rmsnorm", NORM, 1 << 20)
    assert made is not None
    clock = Clock({"base": [5e-5], "wide": [1e-4, 2e-5, 1e-5], "wide_sub": [3e-4]})
    times = speed.race(clock, list(clock.times), made)
    assert times == {"base": 5e-5, "wide": 1e-5, "wide_sub": 3e-4}
    chains = [entry for entry in clock.ran if entry[1] > 4]
    assert chains[:2] == [("base", 20), ("wide", 10)]
    assert ("wide_sub", 4) in clock.ran  # far from the best, so it is not asked again
    assert chains.count(("base", 20)) + chains.count(("wide", 10)) >= speed.TURNS


def test_calls_take_one_matrix_after_the_other() -> None:
    made = speed.trial("matvec", SHAPES["matvec"], 1 << 20)
    assert made is not None
    programs: list[Program] = []
    clock = Clock({"q4": [1e-5]})
    plain = clock.executable
    clock.executable = lambda p, *more: (programs.append(p), plain(p, *more))[1]
    speed.race(clock, ["q4"], made)
    size = max(p.buffers["w"].nbytes for p in programs)
    assert size > (1 << 20) - 2 * made.sizes["w"]
    bound = [call.bindings[0].offset for call in programs[-1].sequences["chain"]]
    assert len(set(bound)) == len(bound) > 4
    assert max(bound) + made.sizes["w"] <= size


def test_times_are_asked_for_once() -> None:
    made = speed.trial("rmsnorm", NORM, 1 << 20)
    assert made is not None
    asked: list[list[str]] = []

    def race(variants: Sequence[str], what: speed.Trial) -> speed.Times:
        asked.append(list(variants))
        return {"base": 2.0, "wide": 3.0}  # and "sub" cannot be had

    speeds = speed.Speeds(NullBackend().info, None)
    shas = dict.fromkeys(["base", "wide", "sub"], "one")
    assert speeds.fastest(race, shas, made) == "base"
    del shas["sub"]
    assert speeds.get(made.name, shas) == {"base": 2.0, "wide": 3.0}
    assert speeds.fastest(race, shas, made) == "base"
    assert asked == [["base", "wide", "sub"]]


def test_times_are_kept_for_the_build_that_they_were_taken_with(tmp_path: Path) -> None:
    info = NullBackend().info
    shas, times = {"base": "one", "wide": "two"}, {"base": 2e-6, "wide": 1e-6}
    speed.Speeds(info, tmp_path).put("op 8", shas, times)
    again = speed.Speeds(info, tmp_path)
    assert again.get("op 8", shas) == times
    assert again.get("op 8", {"base": "one"}) == {"base": 2e-6}
    assert again.get("op 8", {**shas, "wide": "three"}) == {}
    assert again.get("op 9", shas) == {}
    assert again.told() == "op 8: wide 1.0 us, base 2.0 us"
    (file,) = tmp_path.iterdir()
    file.write_text('{"op 8": 3}')
    assert speed.Speeds(info, tmp_path).told() == ""
    speed.Speeds(info, None).put("op 8", {}, {})


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Variants whose time was taken; the wide one is always the fastest."""
    taken: list[str] = []

    def fake(backend: Any, variants: Sequence[str], what: speed.Trial) -> speed.Times:
        taken.extend(variants)
        return {v: 1.0 if v == "wide" else 2.0 for v in variants}

    monkeypatch.setattr(speed, "race", fake)
    return taken


@pytest.mark.gpu
def test_the_fastest_is_used_and_remembered(tmp_path: Path, times: list[str]) -> None:
    op = kernels.op("rmsnorm")
    for turn in range(2):
        backend = VulkanBackend(allow_software=True, verdicts=tmp_path, profile="", measure=True)
        try:
            assert ("rmsnorm 64" in str(backend.info.properties["times"])) == bool(turn)
            assert choose(op, backend.info, None, allowed(backend), NORM).name == "wide"
            assert "rmsnorm 64: wide" in str(backend.info.properties["times"])
            backend.quarantine("rmsnorm", "wide", "0.5 too much")
            assert choose(op, backend.info, None, allowed(backend), NORM).name != "wide"
            backend._kernels._verdicts.put(kernels.manifest()["rmsnorm"]["wide"]["sha256"], "", "")
        finally:
            backend.close()
    assert times.count("wide") == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "push"), SHAPES.items(), ids=list(SHAPES))
def test_measuring_on_a_device(op: str, push: dict[str, float]) -> None:
    backend = VulkanBackend(allow_software=True, profile="", measure=True)
    try:
        before = backend.counters()
        fmt = "q4" if op == "matvec" else None
        chosen = choose(kernels.op(op), backend.info, fmt, allowed(backend), push)
        assert chosen.name in [v.name for v in kernels.op(op).variants]
        assert backend.counters() == before
        assert chosen.name in str(backend.info.properties["times"])
    finally:
        backend.close()


@pytest.mark.gpu
def test_a_software_device_is_not_measured(times: list[str]) -> None:
    backend = VulkanBackend(allow_software=True)
    try:
        if backend.info.software:
            chosen = choose(kernels.op("rmsnorm"), backend.info, None, allowed(backend), NORM)
            assert chosen.baseline
            assert times == []
    finally:
        backend.close()
