# SPDX-License-Identifier: Apache-2.0
"""Profiles of the cores: what the driver said, and what the gate makes of it."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import kernels
from engine.backends import profiles
from engine.backends.base import Limits
from tools.powervr import probe, profile
from tools.powervr.__main__ import measure
from tools.powervr.table import Row

ENTRY: dict[str, Any] = {
    "capabilities": ["Shader"],
    "extensions": [],
    "needs": [],
    "file": "x.spv",
    "baseline": True,
    "workgroup": [32, 1, 1],
    "shared_bytes": 16384,
    "bindings": 4,
    "push_bytes": 128,
}


def kept(core: str) -> dict[str, Any]:
    found = profile.kept(core)
    assert found is not None
    return found


@pytest.mark.parametrize("core", list(probe.CORES))
def test_kept_profile(core: str) -> None:
    made = kept(core)
    assert made["name"] == core
    assert probe.CORES[core] in made["queried"]["deviceName"]
    assert set(made["limits"]) == {f.name for f in fields(Limits)}
    limits = profile.limits_of(made)
    assert limits == profile.limits(made["queried"])
    assert limits.max_workgroup_invocations == 128
    assert limits.max_workgroup_size == (128, 128, 64)
    assert limits.max_shared_bytes == 16384
    assert limits.max_storage_buffers == 12
    assert limits.max_storage_range == 128 << 20
    assert limits.subgroup_size == 32
    assert set(made["features"]) == profile.features(made["queried"])
    assert not {"fp16", "int8", "int16", "int64", "storage8", "storage16"} & set(made["features"])
    assert not {"buffer_address", "memory_model", "fp64"} & set(made["features"])
    assert "int_dot" in made["features"]
    assert "subgroup_quad" not in made["features"]
    assert made["queried"]["timestampValidBits"] == 0


GATED = [
    ({"capabilities": ["Shader", "Int8"]}, "int8"),
    ({"capabilities": ["Shader", "Float16"]}, "fp16"),
    ({"workgroup": [256, 1, 1]}, "256 invocations"),
    ({"bindings": 13}, "13 storage buffers"),
    ({"shared_bytes": 16388}, "16388 bytes shared"),
    ({"push_bytes": 132}, "132 bytes of push constants"),
]


@pytest.mark.parametrize("core", list(probe.CORES))
@pytest.mark.parametrize(("change", "says"), GATED)
def test_what_does_not_fit_a_core_is_not_compiled(
    tmp_path: Path, core: str, change: dict[str, Any], says: str
) -> None:
    # tmp_path is no driver: asking one would fail
    row = measure(tmp_path, core, ENTRY | change, kept(core), 1)
    assert row.state == "gated"
    assert says in row.detail


def test_what_fits_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"Inst group count": 7, "Temp count": 5, "Spill count": 0, "Scratch size": 0}
    asked: list[tuple[object, ...]] = []

    def answer(*args: object) -> probe.Outcome:
        asked.append(args)
        return probe.Outcome("ok", words)

    monkeypatch.setattr(probe, "pipeline", answer)
    monkeypatch.setattr(kernels, "artifacts", lambda: tmp_path)
    for capabilities in (["Shader"], ["Shader", "GroupNonUniform", "GroupNonUniformBallot"]):
        entry = ENTRY | {"capabilities": capabilities}
        row = measure(tmp_path, "bxs-4-64", entry, kept("bxs-4-64"), 9)
        assert row == Row("ok", True, 7, 5)
    assert asked == [(tmp_path, "bxs-4-64", tmp_path / "x.spv", 4, 128, 9)] * 2


@pytest.mark.parametrize("core", list(probe.CORES))
def test_engines_profile_is_the_same(core: str) -> None:
    made = profiles.load(core)
    assert made.limits == vars(profile.limits_of(kept(core)))
    assert made.features == frozenset(kept(core)["features"])


def test_keeping_a_profile_keeps_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kept("axe-1-16m")
    monkeypatch.setattr(profile, "FOLDER", tmp_path / "a")
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    (tmp_path / "axe-1-16m.json").write_text('{"about": "a board", "limits": {}, "x": 1}')
    profile.keep(made)
    assert profile.kept("axe-1-16m") == made
    words = json.loads((tmp_path / "axe-1-16m.json").read_text())
    assert words["about"] == "a board"
    assert (words["limits"], words["features"]) == (made["limits"], made["features"])


def test_subgroups_count_only_where_compute_has_them() -> None:
    queried = kept("bxs-4-64")["queried"] | {"subgroupSupportedStages": 1}
    assert profile.limits(queried).subgroup_size == 1
    assert not any(name.startswith("subgroup") for name in profile.features(queried))


def test_differences_are_named() -> None:
    old = kept("bxs-4-64")
    new = copy.deepcopy(old)
    assert profile.differences(old, new) == []
    new["limits"]["max_shared_bytes"] = 32768
    new["features"].append("fp16")
    new["features"].remove("subgroup_vote")
    assert profile.differences(old, new) == [
        "bxs-4-64: max_shared_bytes was 16384, is 32768",
        "bxs-4-64: the feature fp16 is new",
        "bxs-4-64: the feature subgroup_vote is gone",
    ]
    assert profile.differences(None, new) == ["bxs-4-64: there is no profile in the tree"]


def test_what_the_asking_machine_decides_is_not_kept() -> None:
    queried = kept("axe-1-16m")["queried"] | {"maxMemoryAllocationSize": 5}
    assert profile.make("axe-1-16m", queried) == kept("axe-1-16m")
