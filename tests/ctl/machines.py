# SPDX-License-Identifier: Apache-2.0
"""Machines that a doctor looks at: trees of files, built up by what a board has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pvrd.doctor import Finding, daemon_facts, diagnose
from pvrd.facts import BVNC, Facts, gather

KERNEL = "6.16.0-test"
BXS = ("ti,j721s2-gpu", "img,img-bxs-4-64", "img,img-rogue")
AXE = ("ti,am62-gpu", "img,img-axe-1-16m", "img,img-axe", "img,img-rogue")
BXM = ("thead,th1520-gpu", "img,img-bxm-4-64", "img,img-rogue")
BXE = ("starfive,jh7110-gpu", "img,img-bxe-4-32")
CPU = {"kind": "cpu", "present": True, "state": "ready", "name": "Test CPU", "pid": 11}


class Machine:
    """A tree of /sys, /dev, /usr and so on that is built up by what a board has."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment: dict[str, str] = {}
        self.allowed = True

    def file(self, name: str, text: str = "") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def gpu(self, compatible: tuple[str, ...], driver: str = "", node: str = "") -> None:
        device = self.root / "sys/bus/platform/devices/4e20000000.gpu"
        lines = [f"OF_COMPATIBLE_{index}={word}" for index, word in enumerate(compatible)]
        self.file("sys/bus/platform/devices/4e20000000.gpu/uevent", "\n".join(lines) + "\n")
        if driver:
            (self.root / "sys/bus/platform/drivers" / driver).mkdir(parents=True)
            (device / "driver").symlink_to(f"../../drivers/{driver}")
        if node:
            entry = self.root / "sys/class/drm" / node
            entry.mkdir(parents=True)
            (entry / "device").symlink_to(device)
            self.file(f"dev/dri/{node}")

    def module(self, state: str) -> None:
        if state == "loaded":
            (self.root / "sys/module/powervr").mkdir(parents=True)
        else:
            self.file(f"lib/modules/{KERNEL}/modules.dep", "drivers/powervr.ko.xz: x\n")

    def firmware(self, core: str) -> None:
        self.file(f"lib/firmware/powervr/rogue_{BVNC[core]}_v1.fw.zst")

    def vulkan(self, library: str = "libvulkan_powervr_mesa.so", present: bool = True) -> None:
        self.file("usr/lib/aarch64-linux-gnu/libvulkan.so.1")
        self.file(
            "usr/share/vulkan/icd.d/one.json",
            json.dumps({"ICD": {"library_path": library, "api_version": "1.2.0"}}),
        )
        if present:
            self.file(f"usr/lib/aarch64-linux-gnu/{library}")

    def mesa(self, version: str) -> None:
        entry = "Package: mesa-vulkan-drivers\nStatus: install ok installed\n"
        self.file("var/lib/dpkg/status", f"Package: m\nVersion: 9\n\n{entry}Version: {version}-1\n")

    def holder(self, pid: int, name: str, node: str) -> None:
        self.file(f"proc/{pid}/comm", name + "\n")
        (self.root / f"proc/{pid}/fd").mkdir()
        (self.root / f"proc/{pid}/fd/3").symlink_to(f"/dev/dri/{node}")

    def facts(self, daemon: Mapping[str, Any] | None = None) -> Facts:
        return gather(
            str(self.root),
            daemon=daemon,
            daemon_error="" if daemon else "no pvrd on the user bus",
            environment=self.environment,
            kernel=KERNEL,
            user="ada",
            may=lambda _path: self.allowed,
        )

    def diagnose(self, daemon: Mapping[str, Any] | None = None) -> dict[str, Finding]:
        findings = diagnose(self.facts(daemon))
        for finding in findings:
            assert finding.what
            if finding.ok is False and finding.check not in ("render-node",):
                assert finding.mend, finding
        assert len({finding.check for finding in findings}) == len(findings)
        return {finding.check: finding for finding in findings}


def board(machine: Machine, compatible: tuple[str, ...], core: str, mesa: str = "26.2.6") -> None:
    """A board on which everything is as it should be."""
    machine.gpu(compatible, "powervr", "renderD128")
    machine.module("loaded")
    machine.firmware(core)
    machine.vulkan()
    machine.mesa(mesa)


def daemon(code: str = "", reason: str = "", **gpu: Any) -> dict[str, Any]:
    device = {"kind": "gpu", "present": not code, "code": code, "reason": reason, "name": "GPU"}
    state = {"Version": "1", "State": "cpu" if code else "gpu", "Reason": reason}
    return daemon_facts({**state, "Devices": [{**device, **gpu}, CPU]}, [])
