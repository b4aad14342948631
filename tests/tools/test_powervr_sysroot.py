# SPDX-License-Identifier: Apache-2.0
"""Where the driver comes from: reading apt's and readelf's words; no network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.powervr import probe, sysroot


@pytest.mark.parametrize(
    ("files", "url"),
    [
        ({}, "http://deb.debian.org/debian"),
        (
            {"sources.list": "deb http://m.example/debian/ bookworm main\n"},
            "http://m.example/debian",
        ),
        (
            {"sources.list.d/debian.sources": "Types: deb\nURIs: https://d.example/debian\n"},
            "https://d.example/debian",
        ),
        (
            {
                "sources.list": "# deb http://old.example/debian sid main\n",
                "sources.list.d/other.list": "deb https://o.example/apt stable main\n",
                "sources.list.d/x.list": "deb [arch=amd64] http://x.example/debian sid main\n",
            },
            "http://x.example/debian",
        ),
        (
            {"sources.list": "deb http://s.example/debian-security bookworm-security main\n"},
            "http://deb.debian.org/debian",
        ),
    ],
)
def test_mirror_is_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], url: str
) -> None:
    monkeypatch.delenv("PVRD_POWERVR_MIRROR", raising=False)
    (tmp_path / "sources.list.d").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert sysroot.mirror(tmp_path) == url
    monkeypatch.setenv("PVRD_POWERVR_MIRROR", "http://mine.example/debian")
    assert sysroot.mirror(tmp_path) == "http://mine.example/debian"


def test_compilers_for_other_gpus_are_left_out() -> None:
    simulated = """Reading package lists...
Inst gcc-16-base (16.2.0-4 Debian:unstable [arm64])
Inst libc6 (2.43-7 Debian:unstable [arm64]) []
Inst libllvm22 (1:22.1.8-3 Debian:unstable [arm64])
Inst libffi8 (3.8.0-2 Debian:unstable [arm64])
Inst mesa-vulkan-drivers (26.2.6-1 Debian:unstable [arm64])
Conf libc6 (2.43-7 Debian:unstable [arm64])
"""
    assert sysroot.chosen(simulated) == ["libc6", "libffi8", "mesa-vulkan-drivers"]


def test_needs_of_a_library() -> None:
    text = """Dynamic section at offset 0x1 contains 2 entries:
 0x0000000000000001 (NEEDED)             Shared library: [libdrm.so.2]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
 0x000000000000000e (SONAME)             Library soname: [libvulkan_powervr_mesa.so]
"""
    assert sysroot.needed(text) == ["libdrm.so.2", "libc.so.6"]


def test_mesas_version() -> None:
    assert sysroot.mesa_version({"mesa-vulkan-drivers": "26.2.6-1"}) == (26, 2, 6)
    assert sysroot.mesa_version({"mesa-vulkan-drivers": "1:25.0.7-2+b1"}) < sysroot.OLDEST
    assert sysroot.mesa_version({}) < sysroot.OLDEST


def test_only_a_finished_cache_counts(tmp_path: Path) -> None:
    assert sysroot.packages_of(tmp_path) is None
    (tmp_path / "pvrd").mkdir()
    stamp = tmp_path / "pvrd" / "packages.json"
    stamp.write_text("{")
    assert sysroot.packages_of(tmp_path) is None
    stamp.write_text(json.dumps({"format": 0, "packages": {}}))
    assert sysroot.packages_of(tmp_path) is None
    stamp.write_text(json.dumps({"format": 1, "packages": {"libc6": "2.43-7"}}))
    assert sysroot.packages_of(tmp_path) == {"libc6": "2.43-7"}


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PVRD_POWERVR_CACHE", raising=False)
    assert sysroot.cache() == tmp_path / "pvrd" / "powervr"
    monkeypatch.setenv("PVRD_POWERVR_CACHE", str(tmp_path / "mine"))
    assert sysroot.cache() == tmp_path / "mine"


def test_cores_are_those_that_the_preloaded_library_answers_for() -> None:
    text = (sysroot.HERE / "drm_device.h").read_text()
    known = re.findall(r'^    \{"([a-z0-9-]+)", \d+, \d+, \d+, \d+,', text, re.MULTILINE)
    assert known == list(probe.CORES)


def test_a_process_that_fails_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(script: str, deadline: float = 60) -> probe.Outcome:
        monkeypatch.setattr(probe, "command", lambda *_: ["/bin/sh", "-c", script])
        return probe.pipeline(tmp_path, "bxs-4-64", tmp_path / "x.spv", 1, 0, deadline)

    assert outcome("echo '{\"Temp count\": 3}'") == probe.Outcome("ok", {"Temp count": 3})
    assert outcome("echo probe: VkResult -1 >&2; exit 1").state == "refused"
    assert outcome("echo probe: VkResult -1 >&2; exit 1").detail == "probe: VkResult -1"
    assert outcome("kill -ABRT $$").state == "aborted"
    flood = "echo MESA: warning: FINISHME: x >&2; echo a >&2; echo b >&2; exec sleep 1000"
    assert outcome(flood, 2).detail == "no answer within 2 s: b"
    assert outcome("exec sleep 1000", 0.1) == probe.Outcome("hung", {}, "no answer within 0.1 s")
