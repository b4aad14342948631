# SPDX-License-Identifier: Apache-2.0
"""Kernels that a device computes wrongly are found, remembered and not used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels
from engine.backends import cpu, selftest
from engine.backends.base import Backend
from engine.backends.null import NullBackend
from engine.backends.vulkan import VulkanBackend, api
from kernels.samples import differs, samples
from tests.engine.backends.conftest import PARAMS, chain, chain_data

gpu = pytest.mark.gpu


def test_there_is_a_sample_of_every_variant() -> None:
    tried = {(s.op, s.variant) for s in samples()}
    assert tried == {(op, v.name) for op in kernels.manifest() for v in kernels.op(op).variants}


def test_a_sound_backend_passes(backend: Backend) -> None:
    assert selftest.run(backend) == {}


@pytest.mark.parametrize("name", cpu.isas())
def test_every_instruction_set_passes(name: str) -> None:
    before = cpu.isa()
    try:
        cpu.set_isa(name)
        assert selftest.run(cpu.CpuBackend(2)) == {}
    finally:
        cpu.set_isa(before)


def test_a_device_that_does_nothing_fails_in_everything() -> None:
    tried = [(s.op, s.variant) for s in samples()]
    plain = {f"{op}.{name}" for op, name in tried if not kernels.op(op).variant(name).needs}
    assert set(selftest.run(NullBackend())) == plain
    assert list(selftest.run(NullBackend(), ["swiglu.base"])) == ["swiglu.base"]


def test_what_counts_as_wrong() -> None:
    f = np.array([1, np.nan, 100], np.float32)
    assert differs(f, f) == 0
    assert differs(f, np.array([1.001, np.nan, 100.1], np.float32)) == 0
    assert differs(f, np.array([1.5, np.nan, 100], np.float32)) == pytest.approx(1 / 3)
    assert differs(f, np.array([1, 0, 100], np.float32)) == pytest.approx(1 / 3)
    samples8 = np.array([0, 255, 7, 9], np.uint8)
    assert differs(samples8, np.array([1, 254, 7, 9], np.uint8)) == 0
    assert differs(samples8, np.array([0, 255, 9, 9], np.uint8)) == 0.25
    ids = np.array([5, 6], np.uint32)
    assert differs(ids, np.array([5, 7], np.uint32)) == 0.5
    logits = np.array([2.0, -3.0], np.float32)
    assert differs(logits.view(np.uint32), (logits * 1.0001).view(np.uint32)) == 0


def run_chain(backend: VulkanBackend) -> None:
    exe = backend.executable(chain(), backend.weights({"w": chain_data()[1]}))
    exe.write("params", PARAMS)
    exe.run("first", "second")
    exe.close()


@gpu
def test_the_first_use_is_tried_once_and_costs_no_count(tmp_path: Path) -> None:
    backend = VulkanBackend(allow_software=True, verdicts=tmp_path)
    try:
        run_chain(backend)
        assert backend.counters()["submissions"] == 1
        assert backend.counters()["dispatches"] == 3
        assert backend.info.properties["quarantined"] == ""
        (file,) = tmp_path.iterdir()
        (verdict,) = json.loads(file.read_text()).values()
        assert verdict == {"name": "swiglu.base", "wrong": ""}
    finally:
        backend.close()


@gpu
def test_a_wrong_kernel_is_quarantined_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(_: object, sample: Any) -> dict[str, Any]:
        return {n: np.zeros_like(a) for n, a in sample.arrays.items()}

    backend = VulkanBackend(allow_software=True, verdicts=tmp_path)
    try:
        with monkeypatch.context() as m:
            m.setattr(selftest, "call", wrong)
            with pytest.raises(selftest.Quarantined, match=r"swiglu\.base .*% of h is wrong"):
                run_chain(backend)
        with pytest.raises(selftest.Quarantined):  # it is not tried again
            run_chain(backend)
    finally:
        backend.close()
    again = VulkanBackend(allow_software=True, verdicts=tmp_path)
    try:
        assert again.info.properties["quarantined"] == "swiglu.base"
        with pytest.raises(selftest.Quarantined):
            run_chain(again)
        again.pipeline("rmsnorm", "base")  # the others are tried on their own
    finally:
        again.close()


@gpu
def test_a_doubted_kernel_is_tried_harder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, calls = selftest.call, []

    def wrong_at_last(backend: Backend, sample: Any) -> dict[str, Any]:
        calls.append(sample.op)
        found = call(backend, sample)
        return {n: a + 1 for n, a in found.items()} if len(calls) == selftest.REPEATS else found

    for wrong in (True, False):
        backend = VulkanBackend(allow_software=True, verdicts=tmp_path / str(wrong))
        run_chain(backend)
        backend.quarantine("swiglu", "base", "while serving 3% was wrong")
        with pytest.raises(selftest.Quarantined):
            run_chain(backend)
        backend.close()
        again = VulkanBackend(allow_software=True, verdicts=tmp_path / str(wrong))
        assert again.quarantined() == {}
        if wrong:
            with monkeypatch.context() as m:
                m.setattr(selftest, "call", wrong_at_last)
                with pytest.raises(selftest.Quarantined, match="is wrong"):
                    run_chain(again)
            assert calls == ["swiglu"] * selftest.REPEATS
        else:
            run_chain(again)
        again.close()
        last = VulkanBackend(allow_software=True, verdicts=tmp_path / str(wrong))
        assert list(last.quarantined()) == (["swiglu.base"] if wrong else [])
        last.close()


@gpu
def test_a_kernel_that_the_driver_cannot_compile_is_quarantined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise api.vk.VkErrorUnknown

    backend = VulkanBackend(allow_software=True)
    try:
        with monkeypatch.context() as m:
            m.setattr(api.vk, "vkCreateComputePipelines", fail)
            with pytest.raises(selftest.Quarantined, match="compiling swiglu"):
                run_chain(backend)
        with pytest.raises(selftest.Quarantined):
            run_chain(backend)
    finally:
        backend.close()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": {"name": "b"}}'])
def test_verdicts_that_cannot_be_read_are_found_again(tmp_path: Path, text: str) -> None:
    info = NullBackend().info
    first = selftest.Verdicts(info, tmp_path)
    first.put("sha", "op.base", "wrong")
    (file,) = tmp_path.iterdir()
    assert selftest.Verdicts(info, tmp_path).get("sha") == "wrong"
    file.write_text(text)
    second = selftest.Verdicts(info, tmp_path)
    assert second.get("sha") is None
    second.put("sha", "op.base", "")
    assert selftest.Verdicts(info, tmp_path).get("sha") == ""


def test_verdicts_without_a_place_to_keep_them(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file" / "below"):
        verdicts = selftest.Verdicts(NullBackend().info, folder)
        verdicts.put("sha", "op.base", "wrong")
        assert verdicts.get("sha") == "wrong"


HANG = selftest.Previous("it did not answer for 30 s", silent=True)
ABORT = selftest.Previous("it was killed by signal 6")


@pytest.mark.parametrize(
    ("previous", "stage", "wrong"),
    [
        (HANG, "compile", "the driver's compiler did not return"),
        (HANG, "run", "its self-test did not end"),
        (ABORT, "compile", "the driver's compiler ended the worker: it was killed by signal 6"),
        (ABORT, "run", "its self-test ended the worker: it was killed by signal 6"),
    ],
)
def test_the_successor_knows_what_ended_its_predecessor(
    tmp_path: Path, previous: selftest.Previous, stage: selftest.Stage, wrong: str
) -> None:
    info = NullBackend().info
    selftest.Verdicts(info, tmp_path).begin("sha", "op.base", stage)
    assert selftest.Verdicts(info, tmp_path, previous).get("sha") == wrong
    assert selftest.Verdicts(info, tmp_path).get("sha") == wrong


def test_an_end_that_nobody_saw_counts_the_second_time(tmp_path: Path) -> None:
    info = NullBackend().info
    for _ in range(2):
        verdicts = selftest.Verdicts(info, tmp_path)
        assert verdicts.get("sha") is None
        verdicts.begin("sha", "op.base", "compile")
        verdicts.begin("sha", "op.base", "run")
    wrong = selftest.Verdicts(info, tmp_path).get("sha")
    assert wrong == "its self-test ended the worker or the machine 2 times"


def test_an_end_on_purpose_says_nothing(tmp_path: Path) -> None:
    info = NullBackend().info
    spared = selftest.Previous(spared=True)
    for _ in range(4):
        verdicts = selftest.Verdicts(info, tmp_path, spared)
        assert verdicts.get("sha") is None
        verdicts.begin("sha", "op.base", "compile")
    assert selftest.Verdicts(info, tmp_path).get("sha") is None
    assert selftest.Verdicts(info, tmp_path, ABORT).get("sha")


def test_one_that_passed_before_has_a_second_chance(tmp_path: Path) -> None:
    info = NullBackend().info
    selftest.Verdicts(info, tmp_path).put("sha", "op.base", "")
    for previous in (None, ABORT):
        verdicts = selftest.Verdicts(info, tmp_path, previous)
        assert not verdicts.get("sha")
        verdicts.begin("sha", "op.base", "compile")
    assert "ended the worker" in (selftest.Verdicts(info, tmp_path, ABORT).get("sha") or "")


def test_what_says_nothing_of_a_kernel_is_taken_back(tmp_path: Path) -> None:
    info = NullBackend().info
    for known in (None, ""):
        verdicts = selftest.Verdicts(info, tmp_path)
        if known is not None:
            verdicts.put("sha", "op.base", known)
        verdicts.begin("sha", "op.base", "compile")
        verdicts.restore("sha")
        assert selftest.Verdicts(info, tmp_path, HANG).get("sha") == known


def test_one_that_was_wrong_while_it_served_is_tried_once_more(tmp_path: Path) -> None:
    info = NullBackend().info
    first = selftest.Verdicts(info, tmp_path)
    first.put("sha", "op.base", "")
    for _ in range(2):  # two sessions may find it
        first.put("sha", "op.base", "wrong", serving=True)
    assert first.get("sha") == "wrong"
    second = selftest.Verdicts(info, tmp_path)
    assert (second.get("sha"), second.doubted("sha")) == (None, True)
    second.begin("sha", "op.base", "compile")
    second.restore("sha")
    second.begin("sha", "op.base", "compile")
    second.begin("sha", "op.base", "run")
    second.put("sha", "op.base", "")
    assert second.get("sha") == ""
    third = selftest.Verdicts(info, tmp_path)
    third.put("sha", "op.base", "wrong again", serving=True)
    assert selftest.Verdicts(info, tmp_path).get("sha") == "wrong again"


@pytest.mark.parametrize("end", [True, False])
def test_the_second_trial_is_the_last(tmp_path: Path, end: bool) -> None:
    info = NullBackend().info
    selftest.Verdicts(info, tmp_path).put("sha", "op.base", "wrong", serving=True)
    second = selftest.Verdicts(info, tmp_path)
    second.begin("sha", "op.base", "compile")
    if not end:
        second.put("sha", "op.base", "wrong in the self-test")
    third = selftest.Verdicts(info, tmp_path, ABORT)
    assert ("ended the worker" if end else "in the self-test") in (third.get("sha") or "")
    assert selftest.Verdicts(info, tmp_path).get("sha") == third.get("sha")


def test_the_supervisor_remembers_what_could_not_be_written(tmp_path: Path) -> None:
    info, sha = NullBackend().info, kernels.manifest()["swiglu"]["base"]["sha256"]
    ended_by = {"swiglu.base": "it did not answer for 30 s", "nonsense": "?", "": ""}
    (tmp_path / "file").touch()
    previous = selftest.Previous(ended_by=ended_by)
    for folder in (None, tmp_path / "file" / "below"):
        found = selftest.Verdicts(info, folder, previous).get(sha)
        assert found == "it ended the worker: it did not answer for 30 s"
    selftest.Verdicts(info, tmp_path).put(sha, "swiglu.base", "")  # what was written is better
    assert selftest.Verdicts(info, tmp_path, previous).get(sha) == ""


def test_two_processes_write_one_file(tmp_path: Path) -> None:
    info = NullBackend().info
    first, second = (selftest.Verdicts(info, tmp_path) for _ in range(2))
    first.put("a", "op.a", "wrong")
    second.put("b", "op.b", "")
    both = selftest.Verdicts(info, tmp_path)
    assert (both.get("a"), both.get("b")) == ("wrong", "")


def test_a_new_driver_and_a_new_build_are_tried_anew(tmp_path: Path) -> None:
    info = NullBackend().info
    old, new = (replace(info, properties={"uuid": "u", "driver_version": v}) for v in (1, 2))
    selftest.Verdicts(old, tmp_path).put("sha", "op.base", "wrong")
    assert selftest.Verdicts(old, tmp_path).get("sha") == "wrong"
    assert selftest.Verdicts(old, tmp_path).get("another build") is None
    assert selftest.Verdicts(new, tmp_path).get("sha") is None


@gpu
def test_it_is_written_down_before_the_driver_gets_it(tmp_path: Path) -> None:
    found = []

    def report(what: str, name: str, reason: str) -> None:
        (file,) = tmp_path.iterdir()
        found.append((what, name, json.loads(file.read_text())))

    backend = VulkanBackend(allow_software=True, verdicts=tmp_path)
    try:
        backend.listen(report)
        run_chain(backend)
    finally:
        backend.close()
    (what, name, written), tried = found
    assert (what, name) == ("trying", "swiglu.base")
    assert list(written.values()) == [
        {"name": "swiglu.base", "trying": "compile", "tries": 1, "passed": False}
    ]
    assert tried[:2] == ("tried", "swiglu.base")
    assert list(tried[2].values()) == [{"name": "swiglu.base", "wrong": ""}]
