# SPDX-License-Identifier: Apache-2.0
"""A folder with Debian sid's arm64 Vulkan driver for PowerVR, the C library that it needs, what
libdrm reads of a platform device, and our two C programs.

Nothing is installed: apt gets lists, cache and state of its own below the cache folder, the
packages are unpacked, and qemu looks into that folder before it looks into the system's (-L).
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIB = Path("usr/lib/aarch64-linux-gnu")
DRIVER = LIB / "libvulkan_powervr_mesa.so"
ICD = "/usr/share/vulkan/icd.d/powervr_mesa_icd.json"
OLDEST = (26, 2)  # the first Mesa whose compiler is the one that the table is about

_WANTED = ("mesa-vulkan-drivers", "libvulkan1")
_HEADERS = ("libvulkan-dev", "linux-libc-dev")
# What only the other drivers in mesa-vulkan-drivers need (33 MB); `missing` finds out if not so.
_LEFT_OUT = re.compile(
    r"libllvm|libz3|libxml2|libedit|libbsd|libmd0|libtinfo|libelf|libdrm-amdgpu|libpng"
    r"|libc-gconv|libx11-data|gcc-"
)
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_FORMAT = 1  # of the cache; another number makes it anew

# As the kernel shows the GPU of a board with a device tree; the driver takes it by the DRM
# driver's name, libdrm wants a platform device with something compatible.
_UEVENT = """DRIVER=powervr
OF_NAME=gpu
OF_FULLNAME=/bus@0/gpu@0
OF_COMPATIBLE_0=img,img-rogue
OF_COMPATIBLE_N=1
"""


class SysrootError(Exception):
    """The driver cannot be had here; the text says what to do."""


def cache() -> Path:
    """$PVRD_POWERVR_CACHE, else powervr below the user's cache folder of pvrd."""
    if env := os.environ.get("PVRD_POWERVR_CACHE"):
        return Path(env).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pvrd" / "powervr"


def mirror(etc: Path = Path("/etc/apt")) -> str:
    """The Debian mirror: $PVRD_POWERVR_MIRROR, the one that apt uses here, or Debian's own."""
    if env := os.environ.get("PVRD_POWERVR_MIRROR"):
        return env
    files = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]
    for file in files:
        if file.suffix not in (".list", ".sources") or not file.is_file():
            continue
        for line in file.read_text("utf-8", "replace").splitlines():
            if not line.lstrip().startswith(("deb ", "deb\t", "URIs:")):
                continue
            for word in line.split():
                if re.fullmatch(r"https?://\S+/debian/?", word):
                    return word.rstrip("/")
    return "http://deb.debian.org/debian"


def _run(args: Sequence[str | Path], what: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            list(map(str, args)),
            cwd=cwd,
            env=os.environ | {"LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as e:
        raise SysrootError(f"{what}: {args[0]} is not installed") from e
    if done.returncode:
        raise SysrootError(f"{what} failed:\n{(done.stdout + done.stderr).strip()[-2000:]}")
    return done.stdout


def _apt_options(state: Path) -> list[str]:
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    source = state / "sid.sources"
    source.write_text(
        f"Types: deb\nURIs: {mirror()}\nSuites: sid\nComponents: main\n"
        f"Architectures: arm64\nSigned-By: {_KEYRING}\n"
    )
    options = {
        "Dir::State": state,
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "Dir::Etc::sourcelist": source,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::Log": state,
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Default-Release": "",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": pwd.getpwuid(os.getuid()).pw_name,
        "Acquire::Languages": "none",
    }
    return [f"-o{name}={value}" for name, value in options.items()]


def chosen(simulated: str) -> list[str]:
    """The packages to unpack, from the output of `apt-get --simulate install`."""
    names = re.findall(r"^Inst (\S+)", simulated, re.MULTILINE)
    return sorted(n for n in names if not _LEFT_OUT.match(n))


def _download(state: Path) -> list[Path]:
    options = _apt_options(state)
    _run(["apt-get", *options, "-q", "update"], f"reading the package lists of {mirror()} sid")
    simulated = _run(
        ["apt-get", *options, "-q", "--simulate", "install", *_WANTED],
        "finding out which packages the driver needs",
    )
    packages = [*chosen(simulated), *_HEADERS]
    archives = state / "archives"
    shutil.rmtree(archives)
    archives.mkdir()
    # apt-get checks each file against the signed lists.
    _run(["apt-get", *options, "-q", "download", *packages], "downloading", cwd=archives)
    return sorted(archives.glob("*.deb"))


def _fake_device(root: Path) -> None:
    """What libdrm looks at below /dev/dri and /sys; the node itself is drm_stub.c's."""
    device = root / "sys/dev/char/226:128/device"
    (device / "drm/renderD128").mkdir(parents=True)
    (device / "uevent").write_text(_UEVENT)
    (root / "sys/bus/platform").mkdir(parents=True)
    (device / "subsystem").symlink_to("/sys/bus/platform")
    (root / "dev/dri").mkdir(parents=True)
    (root / "dev/dri/renderD128").touch()


def needed(readelf: str) -> list[str]:
    """The libraries that an ELF file asks for, from the output of readelf -d."""
    return re.findall(r"\(NEEDED\)\s+Shared library: \[(.+)\]", readelf)


def missing(root: Path) -> list[str]:
    """Libraries that the driver or one of its libraries asks for and that are not in `root`."""
    todo, seen, lost = [DRIVER.name, "libvulkan.so.1"], set(), []
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        file = root / LIB / name
        if file.exists():
            todo += needed(_run(["aarch64-linux-gnu-readelf", "-d", str(file)], "readelf"))
        elif not name.startswith("ld-linux"):
            lost.append(name)
    return sorted(lost)


def _unpack(debs: Sequence[Path], root: Path) -> dict[str, str]:
    versions = {}
    for deb in debs:
        _run(["dpkg-deb", "-x", deb, root], f"unpacking {deb.name}")
        name, version = deb.name.split("_")[:2]
        versions[name] = version.replace("%3a", ":")
    for other in (root / LIB).glob("libvulkan_*.so"):
        if other.name != DRIVER.name:
            other.unlink()
    shutil.rmtree(root / "usr/share/doc", ignore_errors=True)
    if not (root / "lib").exists():  # base-files has this link
        (root / "lib").symlink_to("usr/lib")
    return versions


def mesa_version(packages: dict[str, str]) -> tuple[int, ...]:
    """(26, 2, 6) of 26.2.6-1."""
    upstream = packages.get("mesa-vulkan-drivers", "0").rpartition(":")[2]
    return tuple(map(int, re.findall(r"\d+", upstream.partition("-")[0])))


def _make(folder: Path) -> None:
    debs = _download(folder / "apt")
    new = folder / "new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    packages = _unpack(debs, new)
    if mesa_version(packages) < OLDEST:
        raise SysrootError(f"sid has Mesa {packages['mesa-vulkan-drivers']}, 26.2 is needed")
    if lost := missing(new):
        raise SysrootError(f"the driver needs {', '.join(lost)}, which no package brought")
    _fake_device(new)
    (new / "pvrd").mkdir()
    stamp = {"format": _FORMAT, "packages": packages}
    (new / "pvrd" / "packages.json").write_text(json.dumps(stamp, indent=1) + "\n")
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    new.rename(root)
    shutil.rmtree(folder / "apt")


def _compile(root: Path) -> None:
    cc = ["aarch64-linux-gnu-gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"]
    cc += ["-isystem", str(root / "usr/include")]
    out = root / "pvrd"
    shared = [*cc, "-shared", "-fPIC"]
    _run([*shared, HERE / "drm_stub.c", "-o", out / "drm_stub.so"], "compiling drm_stub.c")
    _run([*cc, HERE / "probe.c", "-o", out / "probe"], "compiling probe.c")


def packages_of(root: Path) -> dict[str, str] | None:
    """Names and versions of what lies in a finished folder, None if it is not one."""
    try:
        stamp = json.loads((root / "pvrd" / "packages.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if stamp.get("format") != _FORMAT:
        return None
    packages = stamp["packages"]
    assert isinstance(packages, dict)
    return packages


def prepare(update: bool = False) -> tuple[Path, dict[str, str]]:
    """The folder for qemu's -L with both programs compiled, and the versions of what lies in it.
    Downloads what is not in the cache yet, or all of it if `update`.

    Raises:
        SysrootError: no network, no compiler, or a driver that is too old.
    """
    folder = cache()
    root = folder / "root"
    packages = packages_of(root)
    if packages is None or update:
        folder.mkdir(parents=True, exist_ok=True)
        _make(folder)
        packages = packages_of(root)
        assert packages is not None
    _compile(root)
    return root, packages
