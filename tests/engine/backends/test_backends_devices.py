# SPDX-License-Identifier: Apache-2.0
"""Choosing a GPU and its memory: no driver needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.base import DeviceInfo
from engine.backends.devices import (
    Candidate,
    MemoryType,
    NoDevice,
    judge,
    plan_memory,
    why_none,
)


def device(
    index: int, kind: str, name: str = "", api: tuple[int, int] = (1, 3), compute: bool = True
) -> Candidate:
    properties: dict[str, str | int] = {"uuid": f"{index:032x}"}
    info = DeviceInfo("gpu", name or kind, "driver", kind == "cpu", properties=properties)
    return Candidate(index, kind, api, compute, info)


def chosen(*candidates: Candidate, software: bool = False, want: str = "") -> str:
    names = [v.candidate.info.name for v in judge(candidates, software, want) if v.chosen]
    assert len(names) <= 1
    return names[0] if names else ""


def test_the_order_of_preference() -> None:
    all_kinds = [
        device(i, k) for i, k in enumerate(("cpu", "virtual", "other", "integrated", "discrete"))
    ]
    assert chosen(*all_kinds) == "discrete"
    assert chosen(*all_kinds[:4]) == "integrated"
    assert chosen(*all_kinds[:3]) == "virtual"
    assert chosen(*all_kinds[:1]) == ""
    assert chosen(*all_kinds[:1], software=True) == "cpu"
    assert chosen(*all_kinds, software=True) == "discrete"


def test_each_device_has_its_reason() -> None:
    verdicts = judge(
        [
            device(0, "cpu", "llvmpipe"),
            device(1, "integrated", "old", (1, 1)),
            device(2, "integrated", "no queue", compute=False),
            device(3, "integrated", "good"),
            device(4, "integrated", "also good"),
        ],
        allow_software=False,
    )
    assert [v.code for v in verdicts] == ["software_only", "too_old", "failed", "", ""]
    assert [v.chosen for v in verdicts] == [False, False, False, True, False]
    assert "allow_software" in verdicts[0].reason
    assert "1.1" in verdicts[1].reason
    assert "good is preferred" in verdicts[4].reason


def test_a_device_can_be_named() -> None:
    two = [device(0, "discrete", "PowerVR A"), device(1, "integrated", "PowerVR B")]
    assert chosen(*two, want="powervr b") == "PowerVR B"
    assert chosen(*two, want=f"{1:032x}") == "PowerVR B"
    assert chosen(*two, want="Mali") == ""


def test_why_there_is_none(tmp_path: Path) -> None:
    software = judge([device(0, "cpu", "llvmpipe")], False)
    old = judge([device(0, "integrated", "old", (1, 1)), device(1, "cpu")], False)
    assert why_none([], tmp_path).code == "no_render_node"
    assert why_none([], tmp_path / "none").code == "no_render_node"
    found = why_none(software, tmp_path)
    assert found.code == "software_only"
    assert "llvmpipe" in str(found)
    assert "no render node" in str(found)
    assert why_none(old, tmp_path).code == "too_old"
    (tmp_path / "renderD128").touch()
    assert why_none([], tmp_path).code == "no_icd"
    assert why_none(software, tmp_path).code == "software_only"


def test_render_nodes_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "renderD128").touch()
    monkeypatch.setattr("os.access", lambda *_: False)
    for verdicts in ([], judge([device(0, "cpu")], False)):
        found = why_none(verdicts, tmp_path)
        assert found.code == "no_permission"
        assert "renderD128" in str(found)


def memory(index: int, flags: str, heap: int) -> MemoryType:
    return MemoryType(index, "d" in flags, "v" in flags, "c" in flags, "k" in flags, heap)


def test_memory_of_an_integrated_gpu() -> None:
    only = memory(0, "dvc", 4 << 30)  # PowerVR: one type, uncached for the CPU
    plan = plan_memory([only])
    assert plan.unified
    assert (plan.device, plan.upload, plan.readback, plan.apart) == (only, only, only, False)
    cached = memory(1, "dvck", 4 << 30)
    assert plan_memory([only, cached]).readback == cached
    assert not plan_memory([only, cached]).apart


def test_memory_of_a_discrete_gpu() -> None:
    vram, bar = memory(0, "d", 8 << 30), memory(3, "dvc", 256 << 20)
    system, cached = memory(1, "vc", 16 << 30), memory(2, "vck", 16 << 30)
    plan = plan_memory([vram, system, cached, bar])
    assert not plan.unified
    assert plan.device == vram
    assert plan.upload == system
    assert plan.readback == cached
    assert plan.apart
    whole = memory(3, "dvc", 8 << 30)  # a bar as large as the memory
    plan = plan_memory([vram, system, cached, whole])
    assert (plan.unified, plan.upload, plan.readback, plan.apart) == (True, whole, cached, True)


def test_memory_as_if_it_could_not_be_seen() -> None:
    only = memory(0, "dvck", 4 << 30)
    plan = plan_memory([only], force_staging=True)
    assert not plan.unified
    assert plan.device == only


def test_no_memory_at_all() -> None:
    with pytest.raises(NoDevice):
        plan_memory([memory(0, "d", 1)])
