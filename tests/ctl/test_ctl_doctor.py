# SPDX-License-Identifier: Apache-2.0
"""The doctor tells machines apart: each is a tree of files, nothing of this one is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pvrd.doctor import daemon_facts, diagnose
from pvrd.doctor_machine import BROKEN
from pvrd.facts import BVNC, gather
from tests.ctl.machines import AXE, BXE, BXM, BXS, KERNEL, Machine, board, daemon


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_board_as_it_should_be(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    found = machine.diagnose(daemon())
    assert all(finding.ok for finding in found.values()), found
    assert found["acceleration"].what == "Text and video run on the GPU GPU."
    assert "BXS-4-64" in found["gpu"].what
    assert "conformance" not in found


def test_a_gpu_that_is_held_is_well_but_does_no_work(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    state = daemon(reason="the GPU is held: a game", state="asleep")
    found = machine.diagnose({**state, "state": "cpu", "reason": "the GPU is held: a game"})
    assert found["acceleration"].ok is None
    assert "the GPU GPU is well" in found["acceleration"].what
    assert found["acceleration"].why == "the GPU is held: a game"


def test_without_a_daemon_it_says_so(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    found = machine.diagnose()
    assert found["daemon"].ok is False
    assert found["daemon"].why == "no pvrd on the user bus"
    assert found["acceleration"].ok is None


def test_no_gpu_at_all(machine: Machine) -> None:
    found = machine.diagnose(daemon("no_render_node", "There is no render node."))
    assert (found["gpu"].ok, found["render-node"].ok) == (False, False)
    assert found["acceleration"].ok is False
    assert "CPU Test CPU" in found["acceleration"].what


def test_no_module_in_this_kernel(machine: Machine) -> None:
    machine.gpu(BXS)
    found = machine.diagnose()
    assert "no module for BXS-4-64" in found["kernel"].what
    assert "CONFIG_DRM_POWERVR" in found["kernel"].mend
    assert KERNEL in found["kernel"].why


def test_module_not_loaded(machine: Machine) -> None:
    machine.gpu(BXS)
    machine.module("available")
    assert "modprobe powervr" in machine.diagnose()["kernel"].mend


@pytest.mark.parametrize(
    ("compatible", "core"), [(BXS, "BXS-4-64"), (AXE, "AXE-1-16M"), (BXM, "BXM-4-64")]
)
def test_firmware_missing(machine: Machine, compatible: tuple[str, ...], core: str) -> None:
    machine.gpu(compatible)
    machine.module("loaded")
    found = machine.diagnose()
    assert found["kernel"].ok
    assert found["firmware"].ok is False
    assert f"powervr/rogue_{BVNC[core]}_v1.fw" in found["firmware"].why
    assert found["acceleration"].mend == "See the check firmware."


def test_firmware_there_but_not_started(machine: Machine) -> None:
    machine.gpu(BXS)
    machine.module("loaded")
    machine.firmware("BXS-4-64")
    assert machine.diagnose()["firmware"].ok is None


def test_no_permission_for_the_one_who_asks(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    machine.allowed = False
    found = machine.diagnose()["permission"]
    assert found.ok is False
    assert found.what == "ada may not open /dev/dri/renderD128."
    group = machine.facts().nodes[0].group
    assert f"usermod -aG {group} ada" in found.mend


def test_no_permission_for_the_daemon(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    found = machine.diagnose(daemon("no_permission", "x"))["permission"]
    assert found.ok is False
    assert "pvrd may not open" in found.what


def test_the_asking_user_does_not_matter_where_the_daemon_may(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    machine.allowed = False
    assert machine.diagnose(daemon())["permission"].ok


def test_no_loader(machine: Machine) -> None:
    machine.gpu(BXS, "powervr", "renderD128")
    assert "libvulkan1" in machine.diagnose()["icd"].mend


def test_no_driver_at_all(machine: Machine) -> None:
    machine.file("usr/lib/libvulkan.so.1")
    assert "No manifest" in machine.diagnose()["icd"].why


def test_a_manifest_without_its_library(machine: Machine) -> None:
    machine.vulkan(present=False)
    found = machine.diagnose()["icd"]
    assert found.ok is False
    assert "libvulkan_powervr_mesa.so" in found.why


def test_the_environment_names_the_drivers(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    machine.environment["VK_DRIVER_FILES"] = str(machine.root / "nothing.json")
    assert machine.diagnose()["icd"].ok is False


def test_a_damaged_manifest_is_none(machine: Machine) -> None:
    machine.vulkan()
    machine.file("usr/share/vulkan/icd.d/one.json", "{")
    assert machine.facts().icds == ()


def test_software_driver_alone(machine: Machine) -> None:
    machine.vulkan("libvulkan_lvp.so")
    found = machine.diagnose(daemon("software_only", "Only llvmpipe."))
    assert "computes on the CPU" in found["icd"].what
    assert found["software"].ok is False
    assert found["software"].why == "Only llvmpipe."


def test_software_by_choice(machine: Machine) -> None:
    machine.vulkan("libvulkan_lvp.so")
    found = machine.diagnose(daemon(software=True, name="llvmpipe"))
    assert found["software"].ok is None
    assert found["acceleration"].ok is False


@pytest.mark.parametrize(
    ("compatible", "core"), [(BXS, "BXS-4-64"), (AXE, "AXE-1-16M"), (BXM, "BXM-4-64")]
)
@pytest.mark.parametrize(("mesa", "good"), [("25.3.1", False), ("26.1.9", False), ("26.2.0", True)])
def test_mesa_too_old(
    machine: Machine, compatible: tuple[str, ...], core: str, mesa: str, good: bool
) -> None:
    board(machine, compatible, core, mesa)
    found = machine.diagnose()["mesa"]
    assert found.ok is good
    assert mesa in found.what
    assert core in found.what


def test_mesa_version_from_the_library(machine: Machine) -> None:
    machine.gpu(BXS, "powervr", "renderD128")
    machine.vulkan()
    machine.file("usr/lib/aarch64-linux-gnu/libvulkan_powervr_mesa.so", "\0Mesa 25.0.7\0")
    assert "25.0.7 is too old" in machine.diagnose()["mesa"].what


def test_mesa_version_unknown(machine: Machine) -> None:
    machine.gpu(BXS, "powervr", "renderD128")
    machine.vulkan()
    assert machine.diagnose()["mesa"].ok is None


def test_a_core_for_the_vendor_driver_alone(machine: Machine) -> None:
    machine.gpu(BXE, "powervr", "renderD128")
    assert "does not support BXE-4-32" in machine.diagnose()["mesa"].what


def test_the_vendor_driver_is_not_measured_by_mesa(machine: Machine) -> None:
    machine.gpu(BXE, "pvrsrvkm", "renderD128")
    machine.vulkan("libVK_IMG.so")
    assert "mesa" not in machine.diagnose()


def test_a_core_that_is_not_conformant(machine: Machine) -> None:
    board(machine, AXE, "AXE-1-16M")
    found = machine.diagnose()["conformance"]
    assert found.ok is False
    assert f"Environment={BROKEN}=1" in found.mend
    machine.environment[BROKEN] = "1"
    assert machine.diagnose()["conformance"].ok


def test_the_daemon_knows_conformance_better(machine: Machine) -> None:
    board(machine, AXE, "AXE-1-16M")
    assert machine.diagnose(daemon())["conformance"].ok
    assert machine.diagnose(daemon("non_conformant", "x"))["conformance"].ok is False


def test_another_holder(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    found = machine.diagnose(daemon("busy", "pvrd with process id 42 holds the device."))["holder"]
    assert found.ok is False
    assert "42" in found.why


def test_other_programs_at_the_node_are_named(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    machine.holder(77, "weston", "renderD128")
    machine.holder(11, "pvrd-worker", "renderD128")
    found = machine.diagnose(daemon())["holder"]
    assert found.ok
    assert found.why == "Other users of the render node: weston (77)."


def test_a_quarantined_kernel(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    state = daemon(properties={"quarantined": ["matvec.subgroup"]})
    found = machine.diagnose(state)["kernels"]
    assert found.ok is False
    assert "matvec.subgroup" in found.what


def test_a_quarantined_kernel_with_its_reason(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    reason = "the driver's compiler did not return"
    found = machine.diagnose(daemon(quarantined={"matmul.q4": reason}))["kernels"]
    assert found.what == "Quarantined on this device: matmul.q4."
    assert found.why.startswith(f"matmul.q4: {reason}. ")


def test_measured_times_are_shown(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    times = "rmsnorm 512: wide 4.7 us, base 8.3 us"
    found = machine.diagnose(daemon(properties={"times": times}))["kernels"]
    assert found.ok
    assert found.why == f"Measured, the fastest first: {times}."


def test_a_worker_that_failed(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    found = machine.diagnose(daemon("failed", "vkCreateDevice: out of memory"))["worker"]
    assert "vkCreateDevice" in found.why


def test_no_worker_at_all(machine: Machine) -> None:
    gpu = {"kind": "gpu", "code": "no_render_node", "reason": "there is no render node"}
    cpu = {"kind": "cpu", "code": "failed", "reason": "the device could not be opened: no libgomp"}
    state = {"Version": "1", "State": "failed", "Reason": gpu["reason"], "Devices": [gpu, cpu]}
    found = machine.diagnose(daemon_facts(state, []))["daemon"]
    assert found.ok is False
    assert found.why == (
        "gpu: there is no render node; cpu: the device could not be opened: no libgomp"
    )


def test_what_else_the_daemon_says(machine: Machine) -> None:
    board(machine, BXS, "BXS-4-64")
    state = daemon()
    notes = [
        ("gpu", "warning", "said above", ""),
        ("models", "ok", "one", ""),
        ("models", "ok", "two", ""),
        ("config", "warning", "unknown key a.b", "remove it"),
        ("polkit", "failed", "polkit does not answer", "install polkitd"),
    ]
    keys = ("topic", "status", "message", "remedy")
    state["notes"] = [dict(zip(keys, note, strict=True)) for note in notes]
    found = machine.diagnose(state)
    assert (found["models"].ok, found["models"].what) == (True, "One. Two.")
    assert (found["config"].ok, found["config"].mend) == (None, "Remove it.")
    assert found["polkit"].ok is False
    assert found["acceleration"].ok


def test_a_desktop_gpu(machine: Machine) -> None:
    device = machine.root / "sys/bus/pci/devices/0000:01:00.0"
    machine.file("sys/bus/pci/devices/0000:01:00.0/class", "0x030000\n")
    machine.file("sys/bus/pci/devices/0000:01:00.0/vendor", "0x1002\n")
    machine.file("sys/bus/pci/devices/0000:01:00.0/device", "0x73ff\n")
    found = machine.diagnose()
    assert "0x1002:0x73ff (no driver)" in found["gpu"].what
    assert found["kernel"].ok is False
    (machine.root / "drivers/amdgpu").mkdir(parents=True)
    (device / "driver").symlink_to(machine.root / "drivers/amdgpu")
    assert machine.diagnose()["kernel"].ok


def test_this_machine_can_be_told() -> None:
    assert diagnose(gather(daemon_error="x"))[-1].check == "acceleration"


def test_records_have_the_promised_keys(machine: Machine) -> None:
    for finding in diagnose(machine.facts()):
        assert list(finding.record()) == ["check", "ok", "what", "why", "mend"]
    assert os.listdir(machine.root) == []
