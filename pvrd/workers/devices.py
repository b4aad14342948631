# SPDX-License-Identifier: Apache-2.0
"""Which device this worker owns, or why it has none. Imports libraries late (see __main__)."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import PvrError
from pvrd.workers import holder, neighbour

if TYPE_CHECKING:
    from engine.backends.base import Backend, DeviceInfo, Executable


@functools.cache
def _allowed() -> frozenset[int]:
    """The CPUs that this process was given; asked before it keeps to some of them."""
    return frozenset(os.sched_getaffinity(0))


def cores(config: Mapping[str, Any]) -> neighbour.Cores:
    """The CPUs that work of the CPU backend runs on, and how many threads: `threads` of the
    configuration, else one for each big core but `reserve`. Never more than this process may use.
    """
    wanted = int(config.get("threads") or 0)
    reserve = config.get("reserve")
    return neighbour.choose(_allowed(), wanted, 1 if reserve is None else int(reserve))


@dataclass
class Opened:
    """An open device, or none: then why, `reason` for people and `code` in doctor's words."""

    backend: Backend | None
    reason: str = ""
    code: str = ""


def open_device(kind: str, config: Mapping[str, Any]) -> Opened:
    """Opens the device of a worker of this kind. A GPU that is not there is no error.

    Raises:
        PvrError: the CPU's kernels cannot be loaded.
    """
    if kind == "cpu":
        from engine.backends.cpu import CpuBackend

        chosen = cores(config)
        return Opened(CpuBackend(chosen.threads))
    from engine.backends.crosscheck import CheckedBackend
    from engine.backends.devices import NoDevice
    from engine.backends.selftest import Previous
    from engine.backends.vulkan import VulkanBackend

    before = config.get("previous") or {}
    try:
        backend = VulkanBackend(
            allow_software=bool(config.get("allow_software")),
            want=str(config.get("device") or ""),
            deadline_s=float(config.get("slice_s") or 0),
            verdicts=Path(cache) / "devices" if (cache := config.get("cache")) else None,
            previous=Previous(
                str(before.get("how") or ""),
                bool(before.get("silent")),
                dict(before.get("ended_by") or {}),
                bool(before.get("spared")),
            ),
        )
        if taken := holder.claim(holder.open_nodes()):
            backend.close()
            return Opened(None, taken, "busy")
        return Opened(CheckedBackend(backend, float(config.get("check_rate") or 0)))
    except NoDevice as e:
        return Opened(None, str(e), e.code)
    except PvrError as e:
        return Opened(None, str(e), "failed")


def quarantined(backend: Backend) -> dict[str, str]:
    """The kernels that this device must not run, with the reasons."""
    ask = getattr(backend, "quarantined", None)
    found: dict[str, str] = ask() if ask else {}
    return found


def doubt(backend: Backend, executable: Executable) -> tuple[str, str] | None:
    """A kernel, and why, that an executable was recorded with and that was put aside since."""
    known = quarantined(backend)
    if known:
        for name in getattr(executable, "kernels", ()):
            if name in known:
                return name, known[name]
    return None


def describe(info: DeviceInfo, quarantined: Mapping[str, str]) -> dict[str, Any]:
    """A device as the hello tells it."""
    nodes = sorted(holder.open_nodes()) if info.kind == "gpu" else []
    return {
        "kind": info.kind,
        "name": info.name,
        "driver": info.driver,
        "software": info.software,
        "features": sorted(info.features),
        "limits": asdict(info.limits),
        "properties": {**info.properties, "nodes": nodes} if nodes else dict(info.properties),
        "quarantined": dict(quarantined),
    }
