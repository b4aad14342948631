# SPDX-License-Identifier: Apache-2.0
"""What the machine has, for the doctor: chip, kernel driver, firmware, render node, Vulkan, Mesa.

A finding has `ok` True (works), False (stands in the way of acceleration or of the daemon) or None
(cannot be told from here, or is as it is by choice).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pvrd.facts import BVNC, Facts, Gpu

# Mesa's powervr driver is asked for from here on: the limits and fixes that the kernels count on.
MESA_NEEDED = (26, 2)
MESA_CORES = ("AXE-1-16M", "BXS-4-64", "BXM-4-64")
VENDOR_CORES = ("BXE-2-32", "BXE-4-32")
CONFORMANT_CORES = ("BXS-4-64",)
BROKEN = "PVR_I_WANT_A_BROKEN_VULKAN_DRIVER"
UNIT = "pvrd-worker-gpu@.service"


@dataclass(frozen=True)
class Finding:
    """One check: its stable name, the result, what is so, why it is so, and how to mend it (empty:
    nothing to do)."""

    check: str
    ok: bool | None
    what: str
    why: str = ""
    mend: str = ""

    def record(self) -> dict[str, Any]:
        """The finding as `pvrctl --json doctor` prints it."""
        return {
            "check": self.check,
            "ok": self.ok,
            "what": self.what,
            "why": self.why,
            "mend": self.mend,
        }


def _names(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.core or gpu.name} ({gpu.driver or 'no driver'})" for gpu in gpus)


def hardware(facts: Facts) -> Iterator[Finding]:
    """From the chip to a render node that may be opened."""
    if not facts.gpus:
        yield Finding(
            "gpu",
            False,
            "This machine has no GPU that the kernel knows.",
            "No render node, and neither PCI nor the device tree names a graphics device.",
            "On a board with PowerVR: use a device tree that enables the node of the GPU. "
            "In a container: pass /dev/dri into it. Otherwise there is nothing to mend, "
            "the CPU does the work.",
        )
    else:
        yield Finding("gpu", True, f"The kernel names {_names(facts.gpus)}.")
    bare = [gpu for gpu in facts.gpus if gpu.powervr and not gpu.node]
    for gpu in bare:
        yield from _kernel(facts, gpu)
    if facts.gpus and not bare:
        yield (
            Finding("kernel", True, "A kernel driver is bound.")
            if all(gpu.driver for gpu in facts.gpus)
            else Finding(
                "kernel",
                False,
                f"No kernel driver serves {_names([gpu for gpu in facts.gpus if not gpu.driver])}.",
                "The kernel sees the device, but no module has taken it.",
                "Install the distribution's kernel package with this driver, then reboot.",
            )
        )
    if not facts.nodes:
        yield Finding(
            "render-node",
            False,
            "There is no render node (/dev/dri/renderD*).",
            "The kernel makes one for each GPU with a working driver."
            if not bare
            else f"The driver of {bare[0].core or bare[0].name} has not started; see above.",
            "" if bare else "See the checks gpu and kernel; in a container pass /dev/dri into it.",
        )
        return
    yield Finding(
        "render-node", True, f"Render nodes: {', '.join(node.path for node in facts.nodes)}."
    )
    yield _permission(facts)


def _kernel(facts: Facts, gpu: Gpu) -> Iterator[Finding]:
    core = gpu.core or gpu.name
    if facts.module == "missing":
        yield Finding(
            "kernel",
            False,
            f"The kernel has no module for {core}.",
            f"Linux {facts.kernel} has neither powervr.ko nor the vendor's pvrsrvkm.ko.",
            "Use a kernel with CONFIG_DRM_POWERVR=m (6.8 or later), or the board vendor's kernel.",
        )
        return
    if facts.module == "available":
        yield Finding(
            "kernel",
            False,
            f"The kernel module for {core} is not loaded.",
            f"Linux {facts.kernel} has it, but it has not been loaded.",
            "Load it: `sudo modprobe powervr`; a line in /etc/modprobe.d may forbid it.",
        )
        return
    yield Finding("kernel", True, "The kernel module is loaded.")
    wanted = f"powervr/rogue_{BVNC[gpu.core]}_v1.fw" if gpu.core in BVNC else ""
    have = [
        name for name in facts.firmware if name == wanted or (not wanted and name.endswith(".fw"))
    ]
    if have:
        yield Finding(
            "firmware",
            None,
            f"{core} did not start though its firmware {have[0]} is there.",
            "The module is loaded, yet the device has no driver bound or no render node.",
            "Read `sudo dmesg | grep -i powervr`.",
        )
    else:
        yield Finding(
            "firmware",
            False,
            f"The firmware of {core} is missing.",
            f"/lib/firmware/{wanted or 'powervr/rogue_*_v1.fw'} does not exist.",
            "Install linux-firmware with the folder powervr (or that one file from it), then "
            "`sudo modprobe -r powervr; sudo modprobe powervr`.",
        )


def _permission(facts: Facts) -> Finding:
    code = (facts.daemon or {}).get("code", "")
    shut = [node for node in facts.nodes if not node.allowed]
    if code == "no_permission" or (facts.daemon is None and len(shut) == len(facts.nodes)):
        node = (shut or list(facts.nodes))[0]
        who = "pvrd" if code == "no_permission" else facts.user or "you"
        return Finding(
            "permission",
            False,
            f"{who} may not open {node.path}.",
            f"It belongs to the group {node.group}, mode {node.mode:04o}.",
            f"`sudo usermod -aG {node.group} {who if who != 'you' else '$USER'}` and "
            + ("`sudo systemctl restart pvrd`." if who == "pvrd" else "log in again."),
        )
    if shut and facts.daemon is None:
        return Finding(
            "permission",
            True,
            "Some render nodes may be opened.",
            f"{shut[0].path} may not (group {shut[0].group}).",
        )
    return Finding("permission", True, "The render node may be opened.")


def drivers(facts: Facts) -> Iterator[Finding]:
    """Vulkan: loader, drivers, and whether Mesa knows the chip."""
    code = (facts.daemon or {}).get("code", "")
    usable = [icd for icd in facts.icds if icd.present]
    if not facts.loader:
        yield Finding(
            "icd",
            False,
            "The Vulkan loader (libvulkan.so.1) is not installed.",
            "",
            "Debian and Ubuntu: `sudo apt install libvulkan1 mesa-vulkan-drivers`.",
        )
    elif not usable or code == "no_icd":
        named = [icd for icd in facts.icds if not icd.present]
        yield Finding(
            "icd",
            False,
            "No Vulkan driver is installed.",
            f"{named[0].path} names {named[0].library}, which does not exist."
            if named
            else "No manifest in /usr/share/vulkan/icd.d or /etc/vulkan/icd.d.",
            "Debian and Ubuntu: `sudo apt install mesa-vulkan-drivers`; "
            "vendor drivers come with the board's image.",
        )
    elif all(icd.software for icd in usable):
        yield Finding(
            "icd",
            False,
            "The only Vulkan driver installed computes on the CPU.",
            f"{usable[0].path} names {usable[0].library}.",
            "Install the driver of the GPU (mesa-vulkan-drivers, or the board vendor's package)."
            if facts.gpus
            else "Nothing to mend without a GPU; for tests: `[gpu] allow_software = true`.",
        )
    else:
        yield Finding("icd", True, f"{len(usable)} Vulkan drivers are installed.")
    for gpu in facts.gpus:
        if gpu.powervr and gpu.driver != "pvrsrvkm":
            yield from _mesa(facts, gpu)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _mesa(facts: Facts, gpu: Gpu) -> Iterator[Finding]:
    core = gpu.core
    code = (facts.daemon or {}).get("code", "")
    if core in VENDOR_CORES:
        yield Finding(
            "mesa",
            False,
            f"Mesa does not support {core}.",
            "In practice this core runs with the vendor's driver alone.",
            "Use the board vendor's image with its Vulkan driver (libVK_IMG.so).",
        )
        return
    needed = ".".join(str(part) for part in MESA_NEEDED)
    if (facts.mesa and _version(facts.mesa) < MESA_NEEDED) or code == "too_old":
        yield Finding(
            "mesa",
            False,
            f"Mesa {facts.mesa or '(version unknown)'} is too old for {core or 'this PowerVR'}.",
            f"{core or 'PowerVR'} needs Mesa {needed} or later.",
            f"Take mesa-vulkan-drivers {needed} from the distribution's backports or next release.",
        )
    elif not facts.mesa:
        yield Finding(
            "mesa",
            None,
            "Mesa's version cannot be told from here.",
            f"{core or 'PowerVR'} needs {needed}.",
            "Compare with the version in `vulkaninfo --summary`.",
        )
    else:
        yield Finding("mesa", True, f"Mesa {facts.mesa} knows {core or 'this PowerVR'}.")
    if (core and core not in CONFORMANT_CORES) or code == "non_conformant":
        allowed = facts.broken_allowed if facts.daemon is None else code != "non_conformant"
        yield Finding(
            "conformance",
            allowed,
            f"{core or 'This core'} is not conformant in Mesa"
            + (", and admitted on your order." if allowed else ", so its driver shows no device."),
            f"Mesa hides such cores unless {BROKEN}=1 is set.",
            ""
            if allowed
            else f"`sudo systemctl edit {UNIT}`, add `[Service]` and `Environment={BROKEN}=1`, "
            "then `sudo systemctl restart pvrd`.",
        )
