# SPDX-License-Identifier: Apache-2.0
"""Which GPU is taken and why not the others, and which of its memory. No driver call in here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.backends.base import DeviceInfo
from engine.errors import PvrError

MIN_API = (1, 2)
# In this order a device is preferred; the names are those of VkPhysicalDeviceType.
_PREFERENCE = ("discrete", "integrated", "virtual", "other", "cpu")

# VkSubgroupFeatureFlagBits, bit 0 up.
SUBGROUP_FEATURES = (
    "subgroup_basic",
    "subgroup_vote",
    "subgroup_arithmetic",
    "subgroup_ballot",
    "subgroup_shuffle",
    "subgroup_shuffle_relative",
    "subgroup_clustered",
    "subgroup_quad",
)


class NoDevice(PvrError):
    """No GPU is usable. `code` is one word for programs (docs/architecture.md, the hello), the text
    for people.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class Candidate:
    """A physical device as the loader lists it. `kind` is discrete, integrated, virtual, cpu or
    other.
    """

    index: int
    kind: str
    api: tuple[int, int]
    compute: bool
    info: DeviceInfo


@dataclass(frozen=True)
class Verdict:
    """A device that was looked at; `code` is "" for those that could be used, `chosen` marks the
    one that is.
    """

    candidate: Candidate
    chosen: bool
    code: str
    reason: str


def judge(candidates: Sequence[Candidate], allow_software: bool, want: str = "") -> list[Verdict]:
    """A verdict on each device, in the loader's order; one at most is chosen.

    `want` is the uuid or a part of the name of the only device that will do, "" any.
    """
    reasons = {c.index: _unfit(c, allow_software, want) for c in candidates}
    usable = [c for c in candidates if not reasons[c.index][0]]
    best = min(usable, key=lambda c: (_PREFERENCE.index(c.kind), c.index), default=None)
    out = []
    for c in candidates:
        code, reason = reasons[c.index]
        if not code and c is not best:
            assert best is not None
            reason = f"{best.info.name} is preferred"
        out.append(Verdict(c, c is best, code, reason))
    return out


def _unfit(c: Candidate, allow_software: bool, want: str) -> tuple[str, str]:
    if c.api < MIN_API:
        return "too_old", f"Vulkan {c.api[0]}.{c.api[1]}; 1.2 is needed"
    if not c.compute:
        return "failed", "it has no queue for compute"
    if c.kind == "cpu" and not allow_software:
        return "software_only", "a CPU in disguise; [gpu] allow_software = true would admit it"
    if want and want != c.info.properties.get("uuid") and want.lower() not in c.info.name.lower():
        return "failed", f"the configuration asks for {want!r}"
    return "", ""


def why_none(verdicts: Sequence[Verdict], dri: Path = Path("/dev/dri")) -> NoDevice:
    """The one reason to show when no device was chosen, the nearest to its cause first."""
    try:
        nodes = sorted(dri.glob("renderD*"))
    except OSError:
        nodes = []
    software = [v for v in verdicts if v.code == "software_only"]
    for code in ("too_old", "failed"):
        for v in verdicts:
            if v.code == code:
                return NoDevice(code, f"{v.candidate.info.name}: {v.reason}")
    closed = [n for n in nodes if not os.access(n, os.R_OK | os.W_OK)]
    if nodes and len(closed) == len(nodes):
        names = ", ".join(map(str, closed))
        return NoDevice(
            "no_permission", f"no permission to open {names}; the group `render` has it"
        )
    if software:
        seen = f"only {software[0].candidate.info.name} is there, {software[0].reason}"
        return NoDevice(
            "software_only", seen if nodes else f"{seen}; there is no render node in {dri}"
        )
    if not nodes:
        return NoDevice("no_render_node", f"there is no render node in {dri}")
    return NoDevice("no_icd", f"no Vulkan driver (ICD) takes {', '.join(map(str, nodes))}")


@dataclass(frozen=True)
class MemoryType:
    """One of the device's memory types, with the size of its heap."""

    index: int
    device_local: bool
    visible: bool
    coherent: bool
    cached: bool
    heap_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Memory types for each use. `device` is mapped too when `unified`.

    `apart`: what the host reads well is not the device's own (it lies beyond a bus): large inputs
    and outputs belong into `device`, with copies by the device.
    """

    unified: bool
    device: MemoryType
    upload: MemoryType  # the host writes (params, inputs, staging)
    readback: MemoryType  # the host reads
    apart: bool = False


def plan_memory(types: Sequence[MemoryType], force_staging: bool = False) -> MemoryPlan:
    """Unified when the largest device-local heap is also visible to the host (integrated GPUs,
    resizable BAR).

    Raises:
        NoDevice: the device has no coherent host-visible memory, which Vulkan promises.
    """
    coherent = [t for t in types if t.visible and t.coherent]
    if not coherent or not types:
        raise NoDevice("failed", "the device has no host-visible coherent memory")
    local = [t for t in types if t.device_local] or list(types)
    largest = max(t.heap_bytes for t in local)
    shared = [t for t in local if t.visible and t.coherent and t.heap_bytes == largest]
    # Reads of uncached memory are slow on the host; writes are not.
    readback = max(coherent, key=lambda t: (t.cached, not t.device_local, -t.index))
    if shared and not force_staging:
        device = shared[0]
        back = readback if readback.cached else device
        return MemoryPlan(True, device, device, back, not back.device_local)
    device = next(t for t in local if t.heap_bytes == largest)
    upload = max(coherent, key=lambda t: (not t.device_local, t.heap_bytes, -t.index))
    return MemoryPlan(False, device, upload, readback, True)
