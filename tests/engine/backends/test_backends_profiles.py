# SPDX-License-Identifier: Apache-2.0
"""Device profiles, tensors beyond a binding of a few KiB, and the suite under each profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels
from engine.backends import gate, profiles
from engine.backends.base import DeviceInfo, Limits
from engine.backends.vulkan import VulkanBackend, features
from engine.errors import InvalidArgument
from engine.text.model import TextModel
from engine.video.frames import FrameFormat
from engine.video.network import VideoModel
from engine.video.tiles import plan
from engine.video.upscale import VideoPipeline
from pvrd.workers.devices import open_device
from tests.engine.video.conftest import FAST, enlarge, noise

ROOT = Path(__file__).resolve().parent.parent.parent.parent
ALL = ["axe-1-16m", "bxm-4-64", "bxs-4-64", "old", "phone"]
MESA = ALL[:3]
gpu = pytest.mark.gpu

LARGE = DeviceInfo(
    "gpu",
    "a large GPU",
    "driver",
    False,
    Limits(
        max_workgroup_invocations=1024,
        max_workgroup_size=(1024, 1024, 64),
        max_workgroup_count=(1 << 31, 65535, 65535),
        max_shared_bytes=49152,
        max_storage_buffers=1000,
        max_push_bytes=256,
        max_storage_range=1 << 32,
        max_uniform_range=65536,
        storage_align=16,
        subgroup_size=32,
    ),
    frozenset({"fp16", "int8", "int64", "subgroup_basic", "subgroup_quad", "magic"}),
    {"uuid": "0"},
)
LEAST = DeviceInfo("gpu", "the least GPU", "driver", False, Limits(storage_align=256))


def test_the_profiles_that_there_are() -> None:
    assert profiles.names() == ALL
    with pytest.raises(InvalidArgument, match="no profile 'voodoo'; there are axe-1-16m, bxm"):
        profiles.load("voodoo")
    with pytest.raises(InvalidArgument):
        profiles.load("../profiles/old")


@pytest.mark.parametrize("name", MESA)
def test_figures_are_those_that_the_driver_gave(name: str) -> None:
    """tools/powervr asks Mesa's driver itself."""
    asked = json.loads((ROOT / "tools" / "powervr" / "profiles" / f"{name}.json").read_text())
    ours = profiles.load(name)
    assert json.loads(json.dumps(asdict(ours.alone()))) == asked["limits"]
    assert sorted(ours.features) == asked["features"]


@pytest.mark.parametrize("name", ALL)
def test_a_profile_only_lowers(name: str) -> None:
    profile = profiles.load(name)
    for device in (LARGE, LEAST):
        low = profile.lower(device)
        for key, value in asdict(low.limits).items():
            before = getattr(device.limits, key)
            if key == "storage_align":
                assert value >= before
            elif isinstance(value, tuple):
                assert all(a <= b for a, b in zip(value, before, strict=True))
            else:
                assert value <= before
        assert low.features <= device.features & profile.features
        assert low.properties["profile"] == name
        assert low.name == f"{device.name} as {name}"
        assert profile.lower(low).limits == low.limits
    assert profile.lower(LARGE).limits.max_storage_range == 128 << 20
    assert profile.lower(LARGE).limits.max_storage_buffers == profile.alone().max_storage_buffers


def test_an_older_device_has_subgroups_of_one() -> None:
    low = profiles.load("old").lower(LARGE)
    assert low.limits.subgroup_size == 1
    assert low.limits.max_storage_buffers == 4
    assert low.features == {"subgroup_basic"}


@pytest.mark.parametrize("name", ALL)
def test_each_operation_has_a_variant_for_each_profile(name: str) -> None:
    """The baseline passes the gate everywhere; what a profile lacks is named and kept away."""
    profile = profiles.load(name)
    for op, variants in kernels.manifest().items():
        for variant, entry in variants.items():
            why = gate.misfit(entry, profile.alone(), profile.features)
            if entry["baseline"]:
                assert why == "", f"{op}.{variant}"
            assert not set(entry["needs"]) - profile.features or why


@pytest.mark.parametrize("name", MESA)
def test_no_large_variant_of_a_matrix_operation_fits_powervr(name: str) -> None:
    """Whatever their driver says it can do: not one of these is made for them."""
    profile = profiles.load(name)
    for op in ("matvec", "matmul"):
        for variant, entry in kernels.manifest()[op].items():
            why = gate.misfit(entry, profile.alone(), profile.features)
            assert bool(why) != entry["baseline"], f"{op}.{variant}"


def test_which_profile_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(profiles.VARIABLE, raising=False)
    assert profiles.wanted(None) is None
    monkeypatch.setenv(profiles.VARIABLE, "old")
    assert profiles.wanted(None) == profiles.load("old")
    assert profiles.wanted("phone") == profiles.load("phone")
    assert profiles.wanted("") is None
    monkeypatch.setenv(profiles.VARIABLE, "voodoo")
    with pytest.raises(InvalidArgument, match="voodoo"):
        VulkanBackend(allow_software=True)


def test_a_worker_says_that_there_is_no_such_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(profiles.VARIABLE, "voodoo")
    opened = open_device("gpu", {"allow_software": True})
    assert opened.backend is None
    assert opened.code == "failed"
    assert "no profile 'voodoo'" in opened.reason


@gpu
def test_a_worker_has_the_profiles_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(profiles.VARIABLE, "axe-1-16m")
    opened = open_device("gpu", {"allow_software": True})
    assert opened.backend is not None
    info = opened.backend.info
    opened.backend.close()
    assert info.name.endswith(" as axe-1-16m")
    assert info.limits.max_workgroup_invocations == 128
    assert info.properties["profile"] == "axe-1-16m"


@gpu
@pytest.mark.parametrize("name", ALL)
def test_the_device_is_opened_with_no_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[frozenset[str]] = []
    query = features.query

    def spy(vk: Any, call: Any, pd: Any, allowed: Any = None) -> features.Features:
        found = query(vk, call, pd, allowed)
        if allowed is not None:
            asked.append(found.names)
        return found

    monkeypatch.setattr(features, "query", spy)
    backend = VulkanBackend(allow_software=True, profile=name)
    try:
        profile = profiles.load(name)
        assert backend.info.properties["profile"] == name
        assert backend.info.features <= profile.features
        assert [have <= profile.features for have in asked] == [True]
        assert backend.info.limits.max_storage_range <= 128 << 20
        for op, variants in kernels.manifest().items():
            for variant, entry in variants.items():
                if entry["baseline"]:
                    assert backend.misfit(op, variant) == ""
    finally:
        backend.close()


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-tests of all baseline variants: their bindings are larger than those below may be."""
    folder = tmp_path_factory.mktemp("verdicts")
    backend = VulkanBackend(allow_software=True, verdicts=folder)
    for op, variants in kernels.manifest().items():
        for variant, entry in variants.items():
            if entry["baseline"]:
                backend.pipeline(op, variant)
    backend.close()
    return folder


@pytest.fixture
def small(verdicts: Path) -> Iterator[Any]:
    """Opens GPUs whose bindings are at most so many bytes."""
    opened = []

    def make(nbytes: int, profile: str = "bxs-4-64") -> VulkanBackend:
        backend = VulkanBackend(allow_software=True, profile=profile, verdicts=verdicts)
        opened.append(backend)
        limits = replace(backend.info.limits, max_storage_range=nbytes)
        backend.info = replace(backend.info, limits=limits)
        return backend

    yield make
    for backend in opened:
        backend.close()


@gpu
@pytest.mark.parametrize(("kind", "kib"), [("Q4_0", 6), ("Q8_0", 8), ("F16", 12)])
def test_text_from_bindings_of_a_few_kib(
    small: Any, tiny: Any, tmp_path: Path, kind: str, kib: int
) -> None:
    """Every matrix but the smallest is cut, for embed, matvec and matmul, and the chunk too."""
    shape = tiny.shape(vocab=1500)
    path = tiny.write(tmp_path / "m.gguf", kind, shape)
    ids = [5, 17, 260, 299, 3, 44, 44, 150, 1, 280, 99, 1499, 7, 8, 9, 10, 11, 12]
    truth = tiny.truth(path, shape).logits(ids)[-1]
    model = TextModel.load(path, "", small(kib << 10))
    state = model.state(64)
    assert state.chunk < 32
    program = state.executable.program  # type: ignore[attr-defined]
    sizes = {b.name: b.nbytes for b in program.buffers.values()}
    for op in ("embed", "matvec", "matmul"):
        calls = [c for s in program.sequences.values() for c in s if c.op == op]
        assert any(b.nbytes is not None and b.offset > 0 for c in calls for b in c.bindings)
    assert max(sizes.values()) > kib << 10
    for one in (False, True):
        state.common([])
        step = 1 if one else state.chunk
        for i in range(0, len(ids), step):
            state.run(ids[i : i + step], head=i + step >= len(ids))
        assert np.abs(state.logits() - truth).max() < 0.02
    state.close()
    model.close()


@gpu
@pytest.mark.parametrize("pixel", ["i420", "nv12", "i444", "gray"])
@pytest.mark.parametrize("kib", [16, 64])
def test_video_in_bands_of_a_few_kib(small: Any, pixel: Any, kib: int) -> None:
    fmt = FrameFormat(150, 70, pixel)
    src = noise(fmt)
    got = []
    for backend in (small(kib << 10), small(128 << 20)):
        model = VideoModel.load(str(FAST), backend)
        pipeline = VideoPipeline(backend, model, fmt)
        for buffer in pipeline.executable.program.buffers.values():  # type: ignore[attr-defined]
            assert buffer.nbytes <= backend.info.limits.max_storage_range
        tiles = pipeline.tiling.tiles
        pipeline.close()
        got.append((tiles, enlarge(backend, model, fmt, src)))
        model.close()
    assert got[0][0] > got[1][0]
    for a, b in zip(got[0][1], got[1][1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("most", [24, 64, 65535])
@pytest.mark.parametrize("nbytes", [16 << 10, 64 << 10, 128 << 20])
def test_cuts_keep_to_grid_and_bindings(most: int, nbytes: int) -> None:
    limits = Limits(max_workgroup_count=(most,) * 3, max_storage_range=nbytes)
    t = plan(700, 300, 6, 8, replace(LEAST, limits=limits), sample_bytes=1)
    assert t.nbytes(8) <= nbytes
    assert max(t.window_rows * 704, 2 * t.th * 1408) <= nbytes
    assert t.window_rows <= most
    assert t.batch * 8 // 4 <= most
    assert (t.columns * t.tw >= 700, t.bands * t.th >= 300) == (True, True)


@gpu
def test_video_on_a_small_grid(small: Any) -> None:
    fmt = FrameFormat(150, 70, "i420")
    got = []
    for most in (40, 65535):
        backend = small(128 << 20)
        limits = replace(backend.info.limits, max_workgroup_count=(most,) * 3)
        backend.info = replace(backend.info, limits=limits)
        model = VideoModel.load(str(FAST), backend)
        got.append(enlarge(backend, model, fmt, noise(fmt)))
        model.close()
    for a, b in zip(*got, strict=True):
        np.testing.assert_array_equal(a, b)


@gpu
def test_a_band_that_no_cut_makes_small_enough(small: Any) -> None:
    backend = small(3 << 10)
    model = VideoModel.load(str(FAST), backend)
    with pytest.raises(InvalidArgument, match="does not fit the device's largest binding"):
        VideoPipeline(backend, model, FrameFormat(150, 70, "i420"))
    model.close()


@gpu
@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_the_suite_under_each_profile(name: str, tmp_path: Path) -> None:
    """The gpu tests of the kernels and the engine in a process of their own."""
    where = [
        "tests/kernels",
        "tests/engine",
        "--ignore",
        "tests/engine/backends/" + Path(__file__).name,
    ]
    tests = "not 131072 and not smollm2"
    which = ["-m", "gpu and not long", "-k", tests, f"--basetemp={tmp_path / 't'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *which, *where],
        cwd=ROOT,
        env={**os.environ, profiles.VARIABLE: name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
