# SPDX-License-Identifier: Apache-2.0
"""What goes into which package, and that the packages' data agree with the project's."""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
SITE = "/usr/lib/python3/dist-packages"
# PyPI's names as Debian and Fedora write them, where they differ
DEBIAN = {"pillow": "python3-pil", "pypng": "python3-png", "systemd-python": "python3-systemd"}
FEDORA = {"systemd-python": "python3-systemd"}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """An installation, and the paths of each package; the wheel has the sources, but no kernels."""
    work = tmp_path_factory.mktemp("stage")
    for folder in ("own", "vendor"):
        (work / folder).mkdir()
    with zipfile.ZipFile(work / "own/pvrd-1-py3-none-any.whl", "w") as wheel:
        for package in ("pvrd", "engine"):
            for path in (TREE / package).rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    wheel.write(path, path.relative_to(TREE))
        entries = "".join(f"{name} = {what}\n" for name, what in PROJECT["scripts"].items())
        wheel.writestr("pvrd-1.dist-info/entry_points.txt", f"[console_scripts]\n{entries}")
    for name in ("llguidance", "tokenizers", "vulkan", "numpy"):
        with zipfile.ZipFile(work / f"vendor/{name}-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    stage = [sys.executable, TREE / "tools/package/stage.py", work / "root"]
    python = getattr(sys, "_base_executable", sys.executable)
    options = ["--wheels", work / "own", "--vendor", work / "vendor", "--lists", work / "lists"]
    subprocess.run([*stage, *options, "--python", python], check=True)
    lists = {p.stem: p.read_text().splitlines() for p in (work / "lists").glob("*.txt")}
    return work / "root", lists


def test_each_file_belongs_to_one_package(staged: tuple[Path, dict[str, list[str]]]) -> None:
    root, lists = staged
    listed = [path for paths in lists.values() for path in paths]
    found = {f"/{p.relative_to(root)}" for p in root.rglob("*") if p.is_symlink() or p.is_file()}
    assert len(listed) == len(set(listed))
    assert set(listed) == found
    assert not [path for path in found if path.endswith((".pyc", "installed.json"))]


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("/usr/bin/pvrctl", "pvrd"),
        ("/usr/libexec/pvrd-worker", "pvrd"),
        ("/etc/pvrd/pvrd.toml", "pvrd"),
        ("/usr/share/metainfo/org.pvrd.Pvrd.metainfo.xml", "pvrd"),
        ("/usr/lib/systemd/system-preset/80-pvrd.preset", "pvrd"),
        ("/usr/lib/pvrd/pvrd/client.py", "pvrd"),
        ("/usr/lib/pvrd/engine/video/models", "pvrd"),
        ("/usr/share/pvrd/nsr/nsr-fast.pvrm", "pvrd-models"),
        ("/usr/bin/pvr-agent", "pvrd-agent"),
        ("/usr/lib/pvrd/pvrd/agent/wire.py", "pvrd-agent"),
        ("/usr/lib/systemd/user-preset/80-pvr-http.preset", "pvrd-http"),
        ("/usr/lib/gstreamer-1.0/python/pvrupscale.py", "pvrd-hooks"),
        (f"{SITE}/pvrd/client_async.py", "python3-pvrd"),
        ("/usr/lib/pvrd/tokenizers/__init__.py", "pvrd-wheels"),
    ],
)
def test_where_files_go(
    staged: tuple[Path, dict[str, list[str]]], path: str, package: str
) -> None:
    assert path in staged[1][package]


def test_wheels_of_what_the_distribution_has_stay_out(
    staged: tuple[Path, dict[str, list[str]]],
) -> None:
    assert not [path for path in staged[1]["pvrd-wheels"] if "numpy" in path]


def test_presets_enable_what_they_should(
    staged: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    """By systemctl itself, as the packages' scripts call it."""
    shutil.copytree(staged[0] / "usr/lib/systemd", tmp_path / "usr/lib/systemd")
    (tmp_path / "etc").mkdir()
    system = ("pvrd.service", "pvrd-worker-gpu.socket", "pvrd-worker-cpu.socket")
    users = ("pvr-agent.service", "pvr-http.service")
    for more in (system, ("--global", *users)):
        subprocess.run(["systemctl", f"--root={tmp_path}", "-q", "preset", *more], check=True)
    enabled = {p.name for p in (tmp_path / "etc/systemd").rglob("*.*") if p.is_symlink()}
    assert enabled == {*system, "pvr-agent.service"}


def test_links_lead_somewhere(staged: tuple[Path, dict[str, list[str]]]) -> None:
    root = staged[0]
    links = [p for p in root.rglob("*") if p.is_symlink()]
    assert len(links) == 2
    assert all(p.resolve().is_relative_to(root) and p.exists() for p in links)
    assert (root / "usr/lib/pvrd/engine/video/models/nsr-fast.pvrm").is_file()


def test_client_and_hooks_need_nothing_of_the_daemon(
    staged: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    root, lists = staged
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import pvrd.client, pvrd.client_async, pvrd.hooks.frames, pvrd.hooks.plain\n"
        "own = [m for m in sys.modules.values() if m.__name__.split('.')[0] == 'pvrd']\n"
        "assert all(m.__file__.startswith(sys.argv[1]) for m in own)\n"
        "assert not {'engine', 'kernels', 'vulkan'} & set(sys.modules)\n"
    )
    site = str(root) + SITE
    subprocess.run([sys.executable, "-IBc", program, site], cwd=tmp_path, check=True)
    hooks = [path for path in lists["pvrd-hooks"] if path.startswith(SITE)]
    assert hooks
    assert not set(hooks) & set(lists["python3-pvrd"])


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("vulkan-1-py3-none-any", True),
        ("old-1-py2.py3-none-any", True),
        ("tokenizers-1-cp39-abi3-manylinux_2_17_MACHINE.manylinux2014_MACHINE", True),
        ("own-1-cpOWN-cpOWN-linux_MACHINE", True),
        ("own-1-cp37-cp37m-linux_MACHINE", False),
        ("tokenizers-1-cp39-abi3-manylinux_2_17_other", False),
    ],
)
def test_wheels_that_fit(name: str, fits: bool) -> None:
    stage = runpy.run_path(str(TREE / "tools/package/stage.py"))
    name = name.replace("OWN", f"{sys.version_info[0]}{sys.version_info[1]}")
    name = name.replace("MACHINE", platform.machine())
    assert stage["fits"](name, sys.executable) == fits


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    for folder in ("own", "vendor"):
        (tmp_path / folder).mkdir()
    command = [sys.executable, TREE / "tools/package/stage.py", tmp_path / "root"]
    options = ["--wheels", tmp_path / "own", "--lists", tmp_path / "lists"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "no wheel of pvrd" in done.stderr
    assert "Traceback" not in done.stderr


def test_versions_agree() -> None:
    version = PROJECT["version"]
    changelog = (TREE / "debian/changelog").read_text()
    assert changelog.startswith(f"pvrd ({version}) ")
    spec = (TREE / "packaging/pvrd.spec").read_text()
    assert re.search(rf"^Version: +{re.escape(version)}$", spec, re.MULTILINE)
    assert f"version: '{version}'" in (TREE / "meson.build").read_text()
    metainfo = ET.parse(TREE / "packaging/org.pvrd.Pvrd.metainfo.xml")
    release = metainfo.find("releases/release")
    assert release is not None
    assert release.get("version") == version
    assert f"## {version}" in (TREE / "NEWS.md").read_text()


def test_every_dependency_is_asked_for() -> None:
    names = [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in PROJECT["dependencies"]]
    http = [re.split(r"[^A-Za-z0-9._-]", d)[0] for d in PROJECT["optional-dependencies"]["http"]]
    control = (TREE / "debian/control").read_text()
    spec = (TREE / "packaging/pvrd.spec").read_text()
    for name in names + http:
        assert re.search(rf"\b{DEBIAN.get(name, f'python3-{name}')}\b", control), name
        assert re.search(rf"\b{FEDORA.get(name, f'python3-{name}')}\b", spec), name


def test_appstream_accepts_the_metainfo() -> None:
    file = TREE / "packaging/org.pvrd.Pvrd.metainfo.xml"
    command = ["appstreamcli", "validate", "--no-net", "--no-color", file]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.findall(r"^\s*[EW]: \S+ (\S+)", said, re.MULTILINE)
    # The project has no page of its own that could be named.
    assert set(found) <= {"url-homepage-missing"}, said
    assert "Validation" in said


def test_descriptions_are_as_wide_as_rpmlint_wants() -> None:
    spec = (TREE / "packaging/pvrd.spec").read_text()
    texts = re.findall(r"^%description.*\n((?:[^%\n].*\n)+)", spec, re.MULTILINE)
    assert len(texts) == 7
    assert max(len(line) for text in texts for line in text.splitlines()) < 80


@pytest.mark.parametrize("more", [[], ["--define", "wheels /nowhere"]])
def test_rpm_reads_the_spec(more: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        ["rpmspec", "-P", *more, TREE / "packaging/pvrd.spec"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert ("%files wheels" in done.stdout) == bool(more)


@pytest.mark.parametrize(
    "script",
    [f"debian/{name}" for name in ("pvrd.postinst", "pvrd.postrm", "tests/service")]
    + ["tools/package/deb", "tools/package/rpm"],
)
def test_shell_scripts_can_be_read(script: str) -> None:
    subprocess.run(["sh", "-n", TREE / script], check=True)


RPMBUILD = """#!/bin/sh
for word; do case $word in "_topdir "*) top=${word#_topdir } ;; esac; done
case $top in *" "*) echo "a space in $top" >&2; exit 1 ;; esac
mkdir -p "$top/RPMS/noarch" "$top/SRPMS"
mv "$top"/SOURCES/pvrd-*.tar.gz "$top/RPMS/noarch/pvrd.rpm"
echo "$@"
"""


def test_rpms_below_a_folder_with_spaces(tmp_path: Path) -> None:
    """rpmbuild's own scripts cannot have one; what it is given and what comes out can."""
    programs, out, wheels = tmp_path / "bin", tmp_path / "the out", tmp_path / "the wheels"
    for folder in (programs, wheels):
        folder.mkdir()
    (programs / "rpmbuild").write_text(RPMBUILD)
    (programs / "rpmbuild").chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(programs)}
    subprocess.run([TREE / "tools/package/rpm", out, wheels], check=True, env=env)
    assert sorted(path.name for path in out.iterdir()) == ["build.log", "pvrd.rpm"]
    assert f"wheels {wheels}" in (out / "build.log").read_text()
    assert sorted(path.name for path in programs.iterdir()) == ["rpmbuild"], "nothing is left"
    spec = (TREE / "packaging/pvrd.spec").read_text()
    assert '"%{wheels}"' in spec
    assert '"%{own}"/' in spec
