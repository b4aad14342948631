# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose: which worker they are for, and what they do."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.backends.null import NullBackend
from engine.errors import DeviceLost
from engine.program import Buffer, Program
from pvrd.workers import faults

PROGRAM = Program(
    {"params": Buffer("params", 64, "params"), "out": Buffer("out", 8, "output")}, {"a": ()}
)


def test_faults_go_to_the_first_worker_of_their_kind() -> None:
    spec = "gpu:device_lost:17, cpu:slow:5,gpu:hang"
    assert faults.parse(spec, "gpu", 1).at == {"device_lost": 17, "hang": 1}
    assert faults.parse(["gpu:device_lost:17", "cpu:slow:5"], "cpu", 1).at == {"slow": 5}
    assert faults.parse(spec, "gpu", 2).at == {}
    assert faults.parse("", "gpu", 1).at == {}


@pytest.mark.parametrize(
    "spec",
    [
        "gpu",
        "tpu:hang",
        "gpu:melt",
        "gpu:hang:x",
        "gpu:hang:",
        "gpu:hang:1:2",
        "cpu:compile_hang:a.b",
    ],
)
def test_malformed_faults_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=f"^'{spec}' is no fault of the form"):
        faults.parse(spec, "cpu", 2)


def backend(spec: str) -> faults.FaultyBackend:
    return faults.FaultyBackend(NullBackend(), faults.parse(spec, "gpu", 1))


def test_device_is_lost_at_the_nth_submission_and_stays_lost() -> None:
    faulty = backend("gpu:device_lost:3")
    one = faulty.executable(PROGRAM, faulty.weights({}))
    two = faulty.executable(PROGRAM, faulty.weights({}))
    one.run("a")
    two.run("a")
    for executable in (one, two):
        with pytest.raises(DeviceLost):
            executable.run("a")
    assert faulty.counters()["submissions"] == 2


def test_nan_fills_what_is_read_back() -> None:
    faulty = backend("gpu:nan:2")
    executable = faulty.executable(PROGRAM, faulty.weights({}))
    executable.run("a")
    assert executable.read("out", 8).view(np.float32).tolist() == [0.0, 0.0]
    executable.run("a")
    assert np.isnan(executable.read("out", 8).view(np.float32)).all()


_EXIT = """
from engine.backends.null import NullBackend
from engine.program import Buffer, Program
from pvrd.workers import faults
p = Program({"params": Buffer("params", 64, "params")}, {"a": ()})
b = faults.FaultyBackend(NullBackend(), faults.parse("gpu:exit", "gpu", 1))
b.executable(p, b.weights({})).run("a")
"""


def test_exit_ends_the_process_in_the_middle() -> None:
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", _EXIT], cwd=root, check=False).returncode == 9


def test_armed_faults_wait_for_their_signal_in_every_generation() -> None:
    planned = faults.parse(["gpu:armed", "gpu:device_lost:2", "gpu:slow:1"], "gpu", 7)
    before = signal.getsignal(signal.SIGUSR2)
    try:
        planned.arm()
        made = faults.FaultyBackend(NullBackend(), planned)
        executable = made.executable(PROGRAM, made.weights({}))
        for _ in range(3):
            executable.run("a")
        signal.raise_signal(signal.SIGUSR2)
        executable.run("a")
        with pytest.raises(DeviceLost):
            executable.run("a")
        signal.raise_signal(signal.SIGUSR2)
        executable.run("a")
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_what_vulkan_answers_is_planned_by_call_and_number() -> None:
    lost = faults.parse("gpu:vk_lost:2", "gpu", 1)
    calls = ["vkQueueSubmit", "vkAllocateMemory", "vkQueueSubmit", "vkQueueSubmit"]
    assert [lost.answer(c) for c in calls] == ["", "", "VkErrorDeviceLost", "VkErrorDeviceLost"]
    memory = faults.parse("gpu:vk_memory:2", "gpu", 1)
    assert [memory.answer(c) for c in calls[:3]] == ["", *["VkErrorOutOfDeviceMemory"] * 2]
    assert faults.parse("gpu:node:130", "gpu", 1).node() == ["/dev/dri/renderD130"]


def test_nan_logits_are_nan_in_logits_alone() -> None:
    faulty = backend("gpu:nan_logits")
    buffers = {**PROGRAM.buffers, "topk": Buffer("topk", 8, "output")}
    executable = faulty.executable(Program(buffers, {"a": ()}), faulty.weights({}))
    executable.run("a")
    assert np.isnan(executable.read("topk", 8).view(np.float32)).all()
    assert executable.read("out", 8).view(np.float32).tolist() == [0.0, 0.0]
