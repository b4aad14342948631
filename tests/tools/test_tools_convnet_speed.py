# SPDX-License-Identifier: Apache-2.0
"""How networks are held against ncnn: what counts as right, and where time goes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import convnet_parts, convnet_peers, convnet_speed
from benchmarks.convnet_peers import Way
from benchmarks.convnet_speed import Error, Ours, Peer, Wanted, chosen
from engine.backends.base import Backend
from engine.backends.cpu import CpuBackend
from engine.video.convnet import ConvModel
from tests.engine.video.test_convnet_pipeline import file, load


@pytest.fixture(scope="module")
def cpu_backend() -> Iterator[Backend]:
    backend = CpuBackend(1)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def gpu_backend() -> Iterator[Backend]:
    from engine.backends.vulkan import VulkanBackend

    backend = VulkanBackend(allow_software=True)
    yield backend
    backend.close()


@pytest.fixture
def model(cpu_backend: Backend) -> Iterator[ConvModel]:
    made, _ = load(cpu_backend, file(3))
    yield made
    made.close()


def test_parts_are_those_of_the_whole_frame(cpu_backend: Backend, model: ConvModel) -> None:
    image = convnet_speed.picture(301, 203)
    wanted = Wanted(model, image, 1)
    made = convnet_speed.result(cpu_backend, model, image)
    error = wanted.error(made)
    assert error.right
    assert error.worst <= 1
    made[:, -40:, -40:] ^= 8
    wrong = wanted.error(made)
    assert not wrong.right
    assert wrong.worst >= 7


def test_networks_that_see_far_are_checked_on_a_corner(
    model: ConvModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convnet_speed, "AROUND", 1)
    wanted = Wanted(model, convnet_speed.picture(301, 203), 1)
    assert wanted.image.shape == (3, 96, 96)


def _peer(name: str, ms: float, decibels: float) -> Peer:
    runner: Any = None
    return Peer(Way(name, True), runner, ms, Error(decibels, 3.0))


def test_a_fast_way_that_is_wrong_is_told_beside_a_right_one() -> None:
    quick, good, slow = _peer("a", 1, 30), _peer("b", 2, 60), _peer("c", 3, 70)
    assert chosen([slow, quick, good]) == [good, quick]
    assert chosen([slow, good]) == [good]
    assert chosen([quick]) == [quick]
    assert quick.name == "ncnn, a, WRONG: 30.0 dB, 3 steps at most"
    assert good.name == "ncnn, b"


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_where_time_goes(request: pytest.FixtureRequest, place: str) -> None:
    backend = request.getfixturevalue(f"{place}_backend")
    model, _ = load(backend, file(3))
    ours = Ours(backend, model, convnet_speed.picture(64, 48))
    before = ours.result()
    words: list[str] = []
    convnet_parts.tell(ours, backend, model, words.append)
    assert "frame" in words[0]
    assert "fetch" in words[0]
    kinds = convnet_parts.by_kind(ours, backend, model)
    executable: Any = ours.pipeline.executable
    program = executable.program
    assert sum(kind.calls for kind in kinds.values()) == sum(map(len, program.sequences.values()))
    work = sum(kind.operations for name, kind in kinds.items() if name.startswith("conv2d"))
    assert work == pytest.approx(2 * 64 * 48 * (4 * 20 * 9 + 20 * 24 * 25 + 24 * 12 * 9))
    assert np.array_equal(ours.result(), before)  # the frame is computed as it was
    ours.close()
    model.close()


class FakeRunner:
    """ncnn, whose halves are wrong."""

    def __init__(self, param: Path, threads: int, way: Way) -> None:
        self._wrong, self._backend = way.name == "16 bits", None

    def __call__(self, image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        made = FakeRunner.truth / 255.0
        return 1 - made if self._wrong else made

    def compute(self, image: np.ndarray[Any, Any]) -> None:
        pass

    truth: np.ndarray[Any, Any]


@pytest.mark.gpu
def test_rows_of_a_gpu(
    gpu_backend: Backend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = load(gpu_backend, file(3))
    image = convnet_speed.picture(64, 48)
    FakeRunner.truth = convnet_speed.result(gpu_backend, model, image)
    bench: Any = object.__new__(convnet_speed.Bench)
    bench.args = argparse.Namespace(threads=1, parts=False)
    bench.backend, bench.name, bench.gpu, bench.repeats = gpu_backend, "small", True, 1
    bench.model = model
    bench.runners = {way: FakeRunner(Path(), 1, way) for way in convnet_peers.GPU}
    monkeypatch.setattr(convnet_speed, "milliseconds", _by_turns([1.0, 2.0, 3.0, 4.0]))
    rows = list(bench.rows(64, 48))
    right, wrong = rows
    assert right.name == "small 64x48 ncnn"
    assert right.peer_name == "ncnn, 16 bits, sums in 32"
    assert wrong.name == "small 64x48 ncnn (wrong)"
    assert "16 bits, WRONG" in wrong.peer_name
    said = capsys.readouterr().err
    assert "ours is off our CPU's by" in said
    assert "small 64x48 ncnn (wrong):" in said
    bench.close()


def _by_turns(values: list[float]) -> Any:
    left = iter(values * 20)
    return lambda run, times=1: (run(), next(left))[1]


def test_sizes() -> None:
    assert convnet_speed.size("1920x1080") == (1920, 1080)
    for text in ("0x5", "5", "5x", "-1x2", "5x5x5"):
        with pytest.raises(argparse.ArgumentTypeError, match="no size like"):
            convnet_speed.size(text)
