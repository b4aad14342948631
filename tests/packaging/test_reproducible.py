# SPDX-License-Identifier: Apache-2.0
"""The same sources make the same bytes, wherever and whenever they are built."""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kernels

TREE = Path(__file__).resolve().parents[2]
OPS = ("rmsnorm", "add_bias", "advance")
NOT_COPIED = shutil.ignore_patterns("__pycache__")
FOLDERS = ("a", "another/and longer")


def sources(folder: Path) -> Path:
    """A copy of what the kernels are built of."""
    for name in ("meson.build", "meson_options.txt"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / name, folder)
    for name in ("kernels", "pvrd"):
        shutil.copytree(TREE / name, folder / name, ignore=NOT_COPIED)
    (folder / "engine").mkdir()
    return folder


def spirv(folder: Path, ops: tuple[str, ...]) -> dict[str, str]:
    """Builds the operations below the folder; the digest of each file that is made."""
    tree, out = sources(folder / "tree"), folder / "out"
    out.mkdir()
    tool = tree / "kernels/build_spirv.py"
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    for op in ops:
        subprocess.run(
            [sys.executable, tool, "op", tree, out, op], cwd=folder, env=environment, check=True
        )
    made = [p for p in sorted(out.iterdir()) if p.suffix in (".spv", ".json")]
    for path in made:
        assert str(folder).encode() not in path.read_bytes(), path.name
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in made}


def test_spirv_of_some_operations(tmp_path: Path) -> None:
    first, second = (spirv(tmp_path / folder, OPS) for folder in FOLDERS)
    assert first == second
    assert {f"{op}.json" for op in OPS} < set(first)


@pytest.mark.long
def test_spirv_of_all_operations(tmp_path: Path) -> None:
    """Beside what `make` built in build/."""
    ops = tuple(sorted(p.parent.name for p in (TREE / "kernels").glob("*/op.comp")))
    again = spirv(tmp_path / FOLDERS[1], ops)
    entries = [entry for op in ops for entry in kernels.manifest()[op].values()]
    assert len(entries) > 100
    assert again.keys() == {e["file"] for e in entries} | {f"{op}.json" for op in ops}
    for entry in entries:
        assert again[entry["file"]] == entry["sha256"], entry["file"]


def test_the_library_of_c_kernels(tmp_path: Path) -> None:
    made = []
    for name in FOLDERS:
        tree = sources(tmp_path / name)
        build = tree / "build"
        environment = os.environ | {"CCACHE_DISABLE": "1"}
        meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
        options = ["-Dspirv=false", "-Dops=rmsnorm,add_bias"]
        for command in ([*meson, "setup", *options, build, tree], [*meson, "compile", "-C", build]):
            subprocess.run(
                command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=300
            )
        data = (build / "kernels/libpvrkernels.so").read_bytes()
        assert str(tmp_path).encode() not in data
        made.append(hashlib.sha256(data).hexdigest())
    assert made[0] == made[1]


def test_times_in_the_own_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    member = runpy.run_path(str(TREE / "tools/install/own_wheel.py"))["member"]
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    assert member("pvrd/x.py").date_time == (1980, 1, 1, 0, 0, 0)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1796025600")
    assert member("pvrd/x.py").date_time == (2026, 11, 30, 8, 0, 0)
    assert isinstance(member("x"), zipfile.ZipInfo)


@pytest.mark.long
def test_debian_packages(tmp_path: Path, collected: Path) -> None:
    """Both builds take the same wheels: what dpkg and debhelper make of them is compared."""
    outs = [tmp_path / name for name in FOLDERS]
    for out in outs:
        environment = os.environ | {"PVRD_OWN": str(collected)}
        command = [TREE / "tools/package/deb", out, collected]
        subprocess.run(command, check=True, timeout=600, env=environment)
    digests = [
        {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in out.glob("*.[dt]*")}
        for out in outs
    ]
    assert digests[0] == digests[1]
    said = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error", *outs[0].glob("*.changes")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
