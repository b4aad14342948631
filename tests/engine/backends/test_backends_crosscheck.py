# SPDX-License-Identifier: Apache-2.0
"""Calls of running slices are computed again, and what is wrong is found."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels
from engine.backends import crosscheck
from engine.backends.base import NOTHING, RunStats
from engine.backends.crosscheck import CheckedBackend, Suspect
from engine.backends.null import NullBackend, NullExecutable
from engine.backends.vulkan import VulkanBackend
from engine.pace import ASIDE, LIMIT, clock
from engine.text.generate import Generation
from engine.text.model import TextModel
from engine.text.request import Request
from engine.video import frames
from engine.video.frames import FrameFormat
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline
from kernels import pieces
from tests.engine.conftest import write_model


class Apart(NullExecutable):
    """numpy's executable, in parts; `off` is added to what a kernel writes."""

    off = ""

    def run_apart(self, sequences: Any, apart: Any, before: Any, after: Any) -> RunStats:
        calls = [c for name in sequences for c in self.program.sequences[name]]
        for i, call in enumerate(calls):
            if i in apart:
                before(i)
            self._call(call)
            if f"{call.op}.{call.variant}" == self.off:
                self.view(call.bindings[-1].buffer).view(np.float32)[:] += 0.5
            if i in apart:
                after(i)
        return RunStats(0.0)


class Numpy(NullBackend):
    """numpy's backend, whose kernels can be put aside."""

    def __init__(self, off: str = "") -> None:
        super().__init__(reference=True)
        self.off = off
        self.aside: dict[str, str] = {}

    def executable(self, program: Any, weights: Any, lent: Any = NOTHING) -> Apart:
        exe = Apart(self._counters, program, weights, True, lambda: False, lent)
        exe.off = self.off
        return exe

    def quarantine(self, op: str, variant: str, wrong: str) -> None:
        self.aside[f"{op}.{variant}"] = wrong


def checked(inner: Any, rate: float = 1.0) -> CheckedBackend:
    return CheckedBackend(inner, rate, np.random.default_rng(3))


def generate(backend: Any, path: Path, n: int = 30) -> tuple[list[int], Any]:
    model = TextModel.load(path, "", backend, chunk=3)
    state = model.state(64)
    request = Request("generate", "a long time ago in a far land", settings={"max_tokens": n})
    run = Generation(state, request)
    ids = []
    try:
        while not run.finished:
            ids += [e.id for e in run.step() if hasattr(e, "id")]
        return ids, state.executable
    finally:
        state.close()
        model.close()


@pytest.fixture(scope="module", params=["F16", "Q8_0", "Q4_0"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("m")
    return write_model(folder / "m.gguf", request.param)


def test_every_operation_has_pieces() -> None:
    assert set(pieces._MAKERS) == set(kernels.manifest())


def test_numpy_passes_its_own_checks(path: Path) -> None:
    backend = checked(Numpy())
    ids, exe = generate(backend, path)
    assert backend.counters()["checks"] >= len(ids)
    assert backend.counters()["checks_failed"] == 0
    assert {name.split(".")[0] for name in exe.passed} >= {"matvec", "matmul", "topk", "rope_kv"}
    assert ids == generate(Numpy(), path)[0]


@pytest.mark.parametrize("name", ["swiglu.base", "rmsnorm.base", "attention_decode.f16"])
def test_half_off_is_found(path: Path, name: str) -> None:
    inner = Numpy(name)
    backend = checked(inner)
    with pytest.raises(Suspect, match=name) as error:
        generate(backend, path)
    assert error.value.kernel == name
    assert list(inner.aside) == [name]
    assert "was wrong" in inner.aside[name]


def test_what_was_wrong_keeps_nothing_of_the_job(path: Path) -> None:
    """A worker with nothing to do collects no cycles, so a frame ring would stay open."""

    class Ring:
        pass

    def serve() -> weakref.ref[Ring]:
        ring = Ring()
        kept = weakref.ref(ring)
        with contextlib.suppress(Suspect):
            hold(ring)
        return kept

    def hold(ring: Ring) -> None:
        generate(checked(Numpy("swiglu.base")), path)
        raise AssertionError(ring)

    gc.disable()
    try:
        assert serve()() is None
    finally:
        gc.enable()


def test_a_size_is_checked_before_its_first_result(path: Path) -> None:
    backend = checked(Numpy("swiglu.base"), 1e-9)
    with pytest.raises(Suspect, match=r"swiglu\.base"):
        generate(backend, path, 1)
    sound = checked(Numpy(), 1e-9)
    said: list[bool] = []
    sound.announce = said.append
    generate(sound, path, 2)
    assert said
    assert said == [True, False] * (len(said) // 2)
    checks = sound.counters()["checks"]
    assert checks == len(sound.seen)
    generate(sound, path, 30)
    assert sound.counters()["checks"] == checks


def test_rate_nought_checks_nothing(path: Path) -> None:
    backend = checked(Numpy("swiglu.base"), 0.0)
    generate(backend, path, 3)
    assert backend.counters()["checks"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [False, True])
def test_vulkan_passes_and_counts_the_same(path: Path, staged: bool) -> None:
    plain, watched = (VulkanBackend(True, force_staging=staged) for _ in range(2))
    try:
        ids, _ = generate(plain, path)
        backend = checked(watched)
        assert generate(backend, path)[0] == ids
        counters = backend.counters()
        assert counters.pop("checks") >= len(ids)
        assert counters.pop("checks_failed") == 0
        assert counters.pop("check_bytes") > 0
        assert counters == plain.counters()
    finally:
        plain.close()
        watched.close()


FAST = Path(frames.__file__).with_name("models") / "nsr-fast.pvrm"
FORMATS = [
    FrameFormat(70, 38, "i420", 8, "left", False),
    FrameFormat(45, 22, "nv12", 16, "centre", True),
    FrameFormat(45, 22, "i444", 8, "centre", True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.pixel)
def test_vulkan_video_passes(fmt: FrameFormat) -> None:
    inner = VulkanBackend(allow_software=True)
    backend = checked(inner)
    try:
        model = VideoModel.load(str(FAST), backend)
        pipeline: Any = VideoPipeline(backend, model, fmt, tile=16)
        rng = np.random.default_rng(1)
        src = [rng.integers(0, 256, (p.height, p.stride), dtype=np.uint8) for p in fmt.planes()]
        dst = [np.zeros((p.height, p.stride), np.uint8) for p in pipeline.out_format.planes()]
        for _ in range(8):
            pipeline.begin(src, dst)
            while not pipeline.step():
                pass
        assert backend.counters()["checks"] >= 8
        assert {n.split(".")[0] for n in pipeline.executable.passed} == {
            "luma_in", "conv3x3", "shuffle_out",
            "filter_out" if fmt.pixel == "i444" else "chroma_in",
        }  # fmt: skip
        pipeline.close()
    finally:
        inner.close()


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What slices may take; the process has it back afterwards."""
    for name in ("slice_s", "scale", "streams"):
        monkeypatch.setattr(LIMIT, name, getattr(LIMIT, name))
    return LIMIT


@pytest.mark.parametrize("name", ["swiglu.base", "attention_decode.f16", "rmsnorm.base"])
def test_the_least_pieces_find_it_as_well(path: Path, name: str, limit: Any) -> None:
    limit.slice_s, limit.streams = 1e-9, 1
    with pytest.raises(Suspect, match=name):
        generate(checked(Numpy(name)), path)


def test_with_no_time_at_all_every_kernel_still_has_its_turn(path: Path, limit: Any) -> None:
    limit.slice_s, limit.streams = 1e-9, 1
    backend = checked(Numpy())
    exe = generate(backend, path, 1)[1]
    calls = exe.program.sequences["decode"] + exe.program.sequences["head"]
    counts: dict[str, int] = {}
    exe._turns.clear()
    for _ in range(200):
        name = "{0.op}.{0.variant}".format(calls[exe._pick(calls)])
        counts[name] = counts.get(name, 0) + 1
    assert set(counts) == {f"{c.op}.{c.variant}" for c in calls}
    assert max(counts.values()) - min(counts.values()) <= 1
    for name in counts:  # a check that takes far too long is rare, and is done
        assert backend.costs.chance(name, 1e15) in (1.0, 1 / crosscheck.RAREST)


def test_what_new_sizes_cost_is_bounded_only_beside_a_stream(
    path: Path, limit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    inner = pieces.piece

    def made(*args: Any) -> Any:
        seen.append(args[-1].most)
        return inner(*args)

    monkeypatch.setattr(pieces, "piece", made)
    limit.slice_s = 0.002
    generate(checked(Numpy(), 1e-9), path, 2)
    assert set(seen) == {np.inf}
    seen.clear()
    limit.streams = 1
    generate(checked(Numpy(), 1e-9), path, 2)
    assert seen
    assert max(seen) < np.inf


def test_a_bound_follows_what_checks_cost(limit: Any) -> None:
    costs = crosscheck.Costs()
    assert costs.most("a.b") == np.inf
    limit.slice_s = 0.002
    begin = costs.most("a.b")
    assert costs.most("a.b", 4) == begin / 4
    costs.took("a.b", 1000, 1.0)  # held up by something
    for _ in range(2):
        costs.took("a.b", 1000, 1000 * crosscheck.UNIT_S)
    assert costs.most("a.b") == pytest.approx(begin)
    for _ in range(2):
        costs.took("a.b", 1000, 4000 * crosscheck.UNIT_S)
    assert costs.most("a.b") == pytest.approx(begin / 4)
    assert costs.chance("a.b", begin / 4) == 1
    assert costs.chance("a.b", begin) == pytest.approx(0.5)
    assert costs.chance("a.b", 1000 * begin) == 1 / crosscheck.RAREST
    limit.slice_s = 0.02  # there is a bound for any slice
    assert costs.most("a.b") == pytest.approx(begin / 4 * 2.5)


def test_a_check_is_no_part_of_what_a_slice_took(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that goes on only while something is computed again."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    reference, before = crosscheck._Check._wrong, ASIDE.seconds

    def slow(check: Any) -> Any:
        now[0] += 3.0
        return reference(check)

    monkeypatch.setattr(crosscheck._Check, "_wrong", slow)
    began = clock()
    backend = checked(Numpy())
    generate(backend, path, 3)
    assert ASIDE.seconds - before == pytest.approx(now[0])
    assert now[0] >= 3.0 * backend.checks > 0
    assert clock() == pytest.approx(began)
