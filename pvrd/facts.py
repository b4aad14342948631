# SPDX-License-Identifier: Apache-2.0
"""What can be seen of the machine without a daemon and without Vulkan: the snapshot that
pvrd/doctor.py reads.

Everything is read below `root`, so that a test can lay out a machine of its own. Nothing here
raises for what is absent or unreadable: that is then missing from the snapshot.
"""

from __future__ import annotations

import grp
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Chip -> core, from the kernel's binding img,powervr-rogue.yaml and the SoCs that ship with vendor
# trees.
CORES = {
    "img,img-axe-1-16m": "AXE-1-16M",
    "img,img-axe": "AXE-1-16M",
    "ti,am62-gpu": "AXE-1-16M",
    "img,img-bxs-4-64": "BXS-4-64",
    "ti,j721s2-gpu": "BXS-4-64",
    "img,img-bxm-4-64": "BXM-4-64",
    "thead,th1520-gpu": "BXM-4-64",
    "img,img-bxe-2-32": "BXE-2-32",
    "spacemit,k1-gpu": "BXE-2-32",
    "img,img-bxe-4-32": "BXE-4-32",
    "starfive,jh7110-gpu": "BXE-4-32",
    "img,img-gx6250": "GX6250",
    "mediatek,mt8173-gpu": "GX6250",
}
# Core -> B.V.N.C, the name of its firmware (Mesa's list of PowerVR hardware).
BVNC = {
    "AXE-1-16M": "33.15.11.3",
    "BXS-4-64": "36.53.104.796",
    "BXM-4-64": "36.52.104.182",
    "BXE-2-32": "36.29.52.182",
    "BXE-4-32": "36.50.54.182",
    "GX6250": "4.40.2.51",
}
SOFTWARE_LIBRARIES = ("lvp", "lavapipe", "swiftshader", "vk_swiftshader")
ICD_FOLDERS = ("etc/vulkan/icd.d", "usr/local/share/vulkan/icd.d", "usr/share/vulkan/icd.d")


@dataclass(frozen=True)
class Gpu:
    """A graphics device that the kernel names; `driver` and `node` are empty where there is
    none."""

    name: str
    driver: str = ""
    node: str = ""
    compatible: tuple[str, ...] = ()

    @property
    def powervr(self) -> bool:
        """Is it a PowerVR core?"""
        return (
            self.driver in ("powervr", "pvr", "pvrsrvkm")
            or bool(self.core)
            or any(word.startswith("img,") for word in self.compatible)
        )

    @property
    def core(self) -> str:
        """The core's name, BXS-4-64 say, or nothing."""
        return next((CORES[word] for word in self.compatible if word in CORES), "")


@dataclass(frozen=True)
class Node:
    """A render node: who may open it, and whether the asking user may."""

    path: str
    group: str
    mode: int
    allowed: bool


@dataclass(frozen=True)
class Icd:
    """A Vulkan driver that the loader is told of."""

    path: str
    library: str
    present: bool

    @property
    def software(self) -> bool:
        """Does it compute on the CPU?"""
        return any(word in Path(self.library).name for word in SOFTWARE_LIBRARIES)

    @property
    def powervr(self) -> bool:
        """Does it drive PowerVR?"""
        return any(
            word in Path(self.library).name.lower()
            for word in ("powervr", "vk_img", "vk_pvr", "pvr_")
        )


@dataclass(frozen=True)
class Facts:
    """The snapshot. `module` is one of loaded, available, missing; `daemon` is what the daemon says
    of itself."""

    gpus: tuple[Gpu, ...] = ()
    nodes: tuple[Node, ...] = ()
    module: str = "missing"
    firmware: tuple[str, ...] = ()
    icds: tuple[Icd, ...] = ()
    loader: bool = False
    mesa: str = ""
    broken_allowed: bool = False
    holders: tuple[tuple[int, str], ...] = ()
    kernel: str = ""
    user: str = ""
    daemon: Mapping[str, Any] | None = None
    daemon_error: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


def gather(
    root: str = "/",
    *,
    daemon: Mapping[str, Any] | None = None,
    daemon_error: str = "",
    environment: Mapping[str, str] | None = None,
    kernel: str = "",
    user: str = "",
    may: Callable[[str], bool] | None = None,
) -> Facts:
    """Looks at the machine below `root`.

    Args:
        may: whether the user may read and write a path; access(2) by default.
        kernel: the kernel's release, as uname says it.
    """
    base = Path(root)
    environment = os.environ if environment is None else environment
    kernel = kernel or os.uname().release
    gpus = tuple(_gpus(base))
    powervr = any(gpu.powervr for gpu in gpus)
    icds = tuple(_icds(base, environment))
    nodes = tuple(_nodes(base, may or (lambda path: os.access(path, os.R_OK | os.W_OK))))
    return Facts(
        gpus=gpus,
        nodes=nodes,
        module=_module(base, kernel),
        firmware=tuple(sorted(_firmware(base))),
        icds=icds,
        loader=any(_libraries(base, "libvulkan.so.1")),
        mesa=_mesa(base, icds, powervr),
        broken_allowed=environment.get("PVR_I_WANT_A_BROKEN_VULKAN_DRIVER", "")
        in ("1", "true", "y", "yes"),
        holders=tuple(_holders(base, {node.path for node in nodes})),
        kernel=kernel,
        user=user,
        daemon=daemon,
        daemon_error=daemon_error,
    )


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _list(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _driver(device: Path) -> str:
    try:
        return Path(os.readlink(device / "driver")).name
    except OSError:
        return ""


def _compatible(device: Path) -> tuple[str, ...]:
    return tuple(re.findall(r"^OF_COMPATIBLE_\d+=(.+)$", _read(device / "uevent"), re.M))


def _gpus(base: Path) -> Iterator[Gpu]:
    seen = set()
    for entry in _list(base / "sys/class/drm"):
        if not entry.name.startswith("renderD"):
            continue
        device = entry / "device"
        seen.add(device.resolve())
        vendor = _read(device / "vendor")
        name = f"{vendor}:{_read(device / 'device')}" if vendor else device.resolve().name
        yield Gpu(name, _driver(device), f"/dev/dri/{entry.name}", _compatible(device))
    for device in _list(base / "sys/bus/platform/devices"):
        compatible = _compatible(device) if "gpu" in device.name else ()
        if compatible and device.resolve() not in seen:
            yield Gpu(device.name, _driver(device), "", compatible)
    for device in _list(base / "sys/bus/pci/devices"):
        if (
            _read(device / "class").startswith(("0x0300", "0x0302", "0x0380"))
            and device.resolve() not in seen
        ):
            yield Gpu(f"{_read(device / 'vendor')}:{_read(device / 'device')}", _driver(device))


def _nodes(base: Path, may: Callable[[str], bool]) -> Iterator[Node]:
    for path in _list(base / "dev/dri"):
        if not path.name.startswith("renderD"):
            continue
        try:
            status = path.stat()
        except OSError:
            continue
        try:
            group = grp.getgrgid(status.st_gid).gr_name
        except KeyError:
            group = str(status.st_gid)
        yield Node(f"/dev/dri/{path.name}", group, stat.S_IMODE(status.st_mode), may(str(path)))


def _module(base: Path, kernel: str) -> str:
    if (base / "sys/module/powervr").is_dir() or (base / "sys/module/pvrsrvkm").is_dir():
        return "loaded"
    for place in ("lib/modules", "usr/lib/modules"):
        folder = base / place / kernel
        for name in ("modules.builtin", "modules.dep"):
            if re.search(r"/(powervr|pvrsrvkm)\.ko", _read(folder / name)):
                return "available"
    return "missing"


def _firmware(base: Path) -> set[str]:
    found = set()
    for place in ("lib/firmware/updates", "lib/firmware", "usr/lib/firmware"):
        for path in _list(base / place / "powervr"):
            found.add("powervr/" + re.sub(r"\.(xz|zst)$", "", path.name))
    return found


def _libraries(base: Path, name: str) -> Iterator[Path]:
    for place in ("usr/lib", "usr/local/lib", "lib", "usr/lib64", "lib64"):
        for path in (base / place / name, *(base / place).glob(f"*-linux-*/{name}")):
            if path.exists():
                yield path


def _icds(base: Path, environment: Mapping[str, str]) -> Iterator[Icd]:
    named = environment.get("VK_DRIVER_FILES") or environment.get("VK_ICD_FILENAMES") or ""
    manifests: Iterable[Path] = [Path(name) for name in named.split(":") if name]
    if not named:
        manifests = [
            path
            for folder in ICD_FOLDERS
            for path in _list(base / folder)
            if path.suffix == ".json"
        ]
    for manifest in manifests:
        try:
            library = str(json.loads(manifest.read_bytes())["ICD"]["library_path"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if library.startswith("/"):
            present = (base / library.lstrip("/")).exists()
        elif "/" in library:
            present = (manifest.parent / library).exists()
        else:
            present = any(_libraries(base, library))
        yield Icd(str(manifest), library, present)


def _mesa(base: Path, icds: Iterable[Icd], powervr: bool) -> str:
    """Mesa's version: from the package database, else (PowerVR only) from the driver's library
    itself."""
    match = re.search(
        r"^Package: mesa-vulkan-drivers\n(?:[^\n]+\n)*?Version: (?:\d+:)?([\d.]+)",
        _read(base / "var/lib/dpkg/status"),
        re.M,
    )
    if match:
        return match[1]
    for icd in icds:
        if powervr and icd.powervr and icd.present:
            paths = (
                [base / icd.library.lstrip("/")]
                if "/" in icd.library
                else _libraries(base, icd.library)
            )
            for path in paths:
                try:
                    found = re.search(rb"Mesa (\d+\.\d+\.\d+)", path.read_bytes())
                except OSError:
                    continue
                if found:
                    return found[1].decode()
    return ""


def _holders(base: Path, nodes: set[str]) -> Iterator[tuple[int, str]]:
    """Processes that have a render node open, as far as the asking user may see."""
    for process in _list(base / "proc") if nodes else []:
        if not process.name.isdigit():
            continue
        for entry in _list(process / "fd"):
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target in nodes:
                yield int(process.name), _read(process / "comm")
                break
