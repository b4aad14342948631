# SPDX-License-Identifier: Apache-2.0
"""`make powervr` from end to end, with a driver that a test plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kernels
from engine.backends import profiles
from tools.powervr import __main__ as powervr
from tools.powervr import probe, profile, sysroot, table

ENTRY: dict[str, Any] = {
    "capabilities": ["Shader"],
    "extensions": [],
    "needs": [],
    "workgroup": [32, 1, 1],
    "shared_bytes": 0,
    "bindings": 2,
    "push_bytes": 4,
    "baseline": True,
}
MANIFEST = {
    "add": {
        "base": ENTRY | {"file": "add.base.spv"},
        "fp16": ENTRY
        | {"file": "add.fp16.spv", "capabilities": ["Shader", "Float16"], "baseline": False},
    },
    "mul": {"wide": ENTRY | {"file": "mul.wide.spv", "baseline": False}},
}
GOOD = {"Inst group count": 100, "Temp count": 20, "Spill count": 0, "Scratch size": 0}


class Driver:
    """Answers for each SPIR-V file; all is well unless a test says otherwise."""

    def __init__(self) -> None:
        self.outcomes: dict[str, probe.Outcome] = {}
        self.asked: list[tuple[str, str]] = []

    def pipeline(
        self, root: Path, core: str, spirv: Path, storage: int, push: int, deadline: float
    ) -> probe.Outcome:
        self.asked.append((core, spirv.name))
        return self.outcomes.get(spirv.name, probe.Outcome("ok", GOOD))

    def spills(self, name: str, count: int) -> None:
        self.outcomes[name] = probe.Outcome("ok", GOOD | {"Spill count": count})


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    document = tmp_path / "powervr.md"
    document.write_text(f"# A\n{table.BEGIN}\n{table.END}\n")
    answers = {core: profile.kept(core) for core in probe.CORES}

    def info(root: Path, core: str) -> dict[str, Any]:
        found = answers[core]
        assert found is not None
        return dict(found["queried"])

    monkeypatch.setattr(powervr, "DOCUMENT", document)
    monkeypatch.setattr(profile, "FOLDER", tmp_path / "profiles")
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    packages = {"mesa-vulkan-drivers": "26.2.6-1"}
    monkeypatch.setattr(sysroot, "prepare", lambda update: (tmp_path, packages))
    monkeypatch.setattr(probe, "info", info)
    monkeypatch.setattr(probe, "pipeline", made.pipeline)
    monkeypatch.setattr(kernels, "manifest", lambda: MANIFEST)
    monkeypatch.setattr(kernels, "artifacts", lambda: tmp_path)
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)
    return made


def test_table_is_kept_and_then_holds(
    driver: Driver, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert powervr.main(["--keep"]) == 0
    text = (tmp_path / "powervr.md").read_text()
    assert "| `add` | `fp16` | extra | gated | gated | gated |" in text
    assert "From Mesa 26.2.6-1." in text
    assert profile.kept("axe-1-16m") is not None
    assert not any(name == "add.fp16.spv" for _, name in driver.asked)
    capsys.readouterr()
    assert powervr.main([]) == 0
    said = capsys.readouterr().out
    assert "6 pipelines created, 3 not handed to the driver; no baseline" in said
    assert "Different" not in said
    assert (tmp_path / "powervr.md").read_text() == text


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (probe.Outcome("ok", GOOD | {"Spill count": 2}), "(baseline) spills 2 registers"),
        (probe.Outcome("hung", {}, "no answer within 60 s"), "(baseline): hung: no answer"),
        (probe.Outcome("aborted", {}, "no spill node"), "(baseline): aborted: no spill node"),
        (probe.Outcome("refused", {}, "VkResult -1"), "(baseline): refused: VkResult -1"),
    ],
)
def test_a_baseline_kernel_at_fault(
    driver: Driver, capsys: pytest.CaptureFixture[str], outcome: probe.Outcome, says: str
) -> None:
    assert powervr.main(["--keep"]) == 0
    before = powervr.DOCUMENT.read_text()
    driver.outcomes["add.base.spv"] = outcome
    assert powervr.main([]) == 1
    assert says in capsys.readouterr().out
    # and it cannot be written down as the way things are
    assert powervr.main(["--keep"]) == 1
    assert powervr.DOCUMENT.read_text() == before


def test_a_compiler_that_always_hangs_is_not_asked_for_ever(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hung = probe.Outcome("hung", {}, "no answer")
    many = {f"v{i}": ENTRY | {"file": f"{i}.spv"} for i in range(40)}
    driver.outcomes = {f"{i}.spv": hung for i in range(40)}
    monkeypatch.setattr(kernels, "manifest", lambda: {"add": many})
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert powervr.main([]) == 1
    assert 6 <= len(driver.asked) <= 7  # one may be under way
    assert "not tried, " in capsys.readouterr().out


def test_more_spills_fail_until_they_are_kept(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    assert powervr.main(["--keep"]) == 0
    driver.spills("mul.wide.spv", 3)
    assert powervr.main(["--core", "bxs-4-64"]) == 1
    assert "bxs-4-64: mul.wide spills 3 registers, 0 before" in capsys.readouterr().out
    assert powervr.main(["--keep"]) == 0
    assert powervr.main([]) == 0
    driver.spills("mul.wide.spv", 4)
    assert powervr.main([]) == 1


def test_other_figures_are_told_and_no_fault(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    assert powervr.main(["--keep"]) == 0
    driver.outcomes["add.base.spv"] = probe.Outcome("ok", GOOD | {"Inst group count": 90})
    assert powervr.main(["--core", "axe-1-16m", "--op", "add"]) == 0
    said = capsys.readouterr().out
    assert "axe-1-16m: add.base: 100 / 20 / 0 -> 90 / 20 / 0" in said
    assert "mul" not in said.partition("Different")[2]


def test_what_cannot_be_done_is_said(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert powervr.main(["--op", "div"]) == 2
    assert "no operation div" in capsys.readouterr().err
    assert powervr.main(["--keep", "--op", "add"]) == 2
    assert "for all cores and operations" in capsys.readouterr().err
    assert driver.asked == []

    def fail(update: bool) -> None:
        raise sysroot.SysrootError("no network")

    monkeypatch.setattr(sysroot, "prepare", fail)
    assert powervr.main([]) == 2
    assert "make powervr: no network" in capsys.readouterr().err
