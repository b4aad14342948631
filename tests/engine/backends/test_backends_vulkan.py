# SPDX-License-Identifier: Apache-2.0
"""The Vulkan backend: loss, deadlines, limits, and that nothing leaks."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engine.backends.vulkan import NoDevice, VulkanBackend, api, list_devices
from engine.backends.vulkan.hazards import Hazards
from engine.errors import DeviceLost, InvalidArgument, OutOfMemory, PvrError
from engine.program import Binding, Buffer, Program
from tests.engine.backends.conftest import PARAMS, chain, chain_data, swiglu

gpu = pytest.mark.gpu


def ready(backend: VulkanBackend) -> tuple[Any, np.ndarray]:
    x, w, want = chain_data()
    exe = backend.executable(chain(), backend.weights({"w": w}))
    exe.write("params", PARAMS)
    exe.write("x", x)
    return exe, want


@gpu
def test_the_n_th_submission_reports_loss_and_all_after_it() -> None:
    backend = VulkanBackend(allow_software=True, lose_at=3)
    try:
        exe, _ = ready(backend)
        exe.run("first")
        exe.run("second")
        for _ in range(2):
            with pytest.raises(DeviceLost):
                exe.run("first")
    finally:
        backend.close()


@gpu
@pytest.mark.parametrize(
    ("function", "result", "error"),
    [
        ("vkQueueSubmit", "VkErrorDeviceLost", DeviceLost),
        ("vkWaitForFences", "VkErrorDeviceLost", DeviceLost),
        ("vkQueueSubmit", "VkErrorOutOfDeviceMemory", OutOfMemory),
        ("vkWaitForFences", "VkErrorOutOfHostMemory", DeviceLost),
        ("vkResetFences", "VkErrorUnknown", PvrError),
    ],
)
def test_every_result_becomes_an_error_of_ours(
    function: str, result: str, error: type[PvrError], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = VulkanBackend(allow_software=True)
    try:
        exe, _ = ready(backend)

        def fail(*_: object) -> None:
            raise getattr(api.vk, result)

        with monkeypatch.context() as m:
            m.setattr(api.vk, function, fail)
            with pytest.raises(PvrError, match=function) as caught:
                exe.run("first")
        assert type(caught.value) is error
        if error is DeviceLost:
            with pytest.raises(DeviceLost):
                exe.run("first")
        else:
            exe.run("first")
    finally:
        backend.close()


@gpu
def test_result_codes_that_the_package_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = VulkanBackend(allow_software=True)
    try:
        exe, _ = ready(backend)

        def fail(*_: object) -> None:
            raise api.vk.exception_codes[-1000174001]

        with monkeypatch.context() as m:
            m.setattr(api.vk, "vkQueueSubmit", fail)
            with pytest.raises(PvrError, match="VkResult -1000174001"):
                exe.run("first")
    finally:
        backend.close()


@gpu
def test_memory_that_the_driver_refuses_is_told_with_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = VulkanBackend(allow_software=True)
    try:

        def fail(*_: object) -> None:
            raise api.vk.VkErrorOutOfDeviceMemory

        with monkeypatch.context() as m:
            m.setattr(api.vk, "vkAllocateMemory", fail)
            with pytest.raises(OutOfMemory, match="no 4096 bytes left"):
                backend.weights({"w": np.zeros(4096, np.uint8)})
        assert backend.weights({"w": np.zeros(4096, np.uint8)}).nbytes() == 4096
    finally:
        backend.close()


@gpu
def test_a_slice_past_its_deadline_is_device_loss() -> None:
    """The work takes far longer than the deadline, and the backend still closes cleanly once it is
    done.
    """
    backend = VulkanBackend(allow_software=True)
    try:
        f = 4096
        buffers = {
            "params": Buffer("params", 64, "params"),
            "x": Buffer("x", 8 * f * 128, "input"),
            "h": Buffer("h", 4 * f * 128, "scratch"),
        }
        calls = (swiglu(Binding("x"), Binding("h"), f, 128),) * 20
        exe = backend.executable(Program(buffers, {"long": calls}), backend.weights({}))
        exe.write("params", np.array([128] + [0] * 15, np.uint32))
        backend.deadline_s = 1e-9
        with pytest.raises(DeviceLost, match="did not finish"):
            exe.run("long")
        with pytest.raises(DeviceLost):
            exe.run("long")
    finally:
        backend.close()


@gpu
def test_a_device_that_hangs_is_left_to_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Handles that a hung slice may use are never destroyed; closing waits for it only once."""
    backend = VulkanBackend(allow_software=True)
    exe, _ = ready(backend)
    waits = []
    deadline = 120 if backend.info.software else 10

    def hang(*args: object) -> None:
        waits.append(args[-1])
        raise api.vk.VkTimeout

    destroyed: list[object] = []
    with monkeypatch.context() as m:
        m.setattr(api.vk, "vkWaitForFences", hang)
        m.setattr(api.vk, "vkDestroyDevice", lambda *a: destroyed.append(a))
        with pytest.raises(DeviceLost, match=f"did not finish within {deadline} s"):
            exe.run("first")
        backend.close()
    assert waits == [deadline * 10**9, 5 * 10**9]
    assert not destroyed


@gpu
def test_no_binding_is_larger_than_the_device_allows() -> None:
    backend = VulkanBackend(allow_software=True)
    try:
        limits = replace(backend.info.limits, max_storage_range=4096)
        backend.info = replace(backend.info, limits=limits)
        with pytest.raises(InvalidArgument, match="at most 4096 go into one binding"):
            ready(backend)
        most = (2, 1, 1)
        limits = replace(limits, max_storage_range=1 << 30, max_workgroup_count=most)
        backend.info = replace(backend.info, limits=limits)
        with pytest.raises(InvalidArgument, match="at most \\(2, 1, 1\\)"):
            ready(backend)
        limits = replace(limits, max_workgroup_invocations=16)
        backend.info = replace(backend.info, limits=limits)
        assert "invocations" in backend.misfit("swiglu", "base")
        assert backend.misfit("swiglu", "magic") == "it was not compiled"
    finally:
        backend.close()


@gpu
def test_a_call_that_does_not_keep_its_contract_is_refused() -> None:
    backend = VulkanBackend(allow_software=True)
    try:
        weights = backend.weights({"w": chain_data()[1]})
        good = chain()
        call = good.sequences["first"][0]
        for wrong, why in (
            (replace(call, bindings=call.bindings[:1]), "takes 2 bindings"),
            (replace(call, push=b""), "takes 12 bytes"),
            (replace(call, groups=(0, 1, 1)), "groups"),
            (replace(call, variant="magic"), "was not compiled"),
        ):
            with pytest.raises(InvalidArgument, match=why):
                backend.executable(replace(good, sequences={"first": (wrong,)}), weights)
    finally:
        backend.close()


@gpu
def test_opening_and_closing_executables_leaks_nothing() -> None:
    backend = VulkanBackend(allow_software=True)
    try:
        w = chain_data()[1]

        def cycle(times: int) -> None:
            for _ in range(times):
                weights = backend.weights({"w": w})
                exe = backend.executable(chain(), weights)
                exe.write("params", PARAMS)
                exe.run("first", "second")
                exe.close()
                weights.close()

        cycle(100)
        process = psutil.Process()
        rss, fds = process.memory_info().rss, process.num_fds()
        cycle(1000)
        assert process.num_fds() == fds
        # A leaked executable would be 20 KiB at least, 20 MiB in all.
        assert process.memory_info().rss - rss < 8 << 20
        assert not backend._live
    finally:
        backend.close()


@gpu
def test_a_backend_can_be_closed_and_opened_again() -> None:
    for _ in range(3):
        backend = VulkanBackend(allow_software=True)
        exe, want = ready(backend)
        exe.run("first", "second")
        assert np.isfinite(exe.read("y", want.size * 4).view(np.float32)).all()
        backend.close()
        backend.close()


@gpu
def test_devices_are_listed_with_their_reasons() -> None:
    verdicts = list_devices(allow_software=True)
    assert sum(v.chosen for v in verdicts) == 1
    for v in list_devices():
        if v.candidate.info.software:
            assert (v.chosen, v.code) == (False, "software_only")
        assert v.candidate.info.limits.max_storage_range >= 128 << 20
        assert len(str(v.candidate.info.properties["uuid"])) == 32


@gpu
def test_a_named_device_that_is_not_there() -> None:
    with pytest.raises(NoDevice, match="asks for 'Voodoo'"):
        VulkanBackend(allow_software=True, want="Voodoo")


def test_no_driver_at_all(tmp_path: Path) -> None:
    """With the loader told of no driver, opening says so in one sentence and with a code."""
    code = (
        "from engine.backends.vulkan import VulkanBackend, NoDevice\n"
        "try:\n    VulkanBackend(allow_software=True)\n"
        "except NoDevice as e:\n    print(e.code, '|', e)\n"
    )
    nothing = str(tmp_path / "none.json")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "VK_ICD_FILENAMES": nothing,
            "VK_DRIVER_FILES": nothing,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    word = done.stdout.split(" | ")[0]
    assert word in ("no_render_node", "no_permission", "no_icd")


def test_only_hazards_need_a_barrier() -> None:
    h = Hazards()
    assert not h.add([("x", 0, 64), ("a", 0, 64)], ["r", "w"])
    assert not h.add([("x", 0, 64), ("a", 64, 128)], ["r", "w"])  # beside what was written
    assert h.add([("a", 32, 96), ("b", 0, 64)], ["r", "w"])  # reads both
    assert not h.add([("a", 0, 64), ("c", 0, 64)], ["r", "w"])  # reads again
    assert h.add([("c", 0, 64), ("a", 0, 4)], ["r", "w"])  # writes what was read
    assert h.add([("x", 0, 64), ("a", 0, 4)], ["r", "w"])  # writes what was written
    assert h.add([("a", 0, 8)], ["rw"])
