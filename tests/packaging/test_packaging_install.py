# SPDX-License-Identifier: Apache-2.0
"""tools/install/system.py into a folder: what is put where, and that nothing of it stays."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
# Not the one of a virtual environment, which lies in the tree.
PYTHON = getattr(sys, "_base_executable", sys.executable)
MAIN = "import sys\n\ndef main():\n    print(sys.path[0], sys.flags.isolated)\n"
ENTRIES = """[console_scripts]
pvrd = pvrd.__main__:main
pvrctl = pvrd.ctl.main:main
pvrd-worker = pvrd.workers.__main__:main
pvr-agent = pvrd.agent.__main__:main
pvr-http = pvrd.http.__main__:main
"""


def wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(
        folder,
        "pvrd",
        {
            "pvrd/__init__.py": "",
            "pvrd/ctl/__init__.py": "",
            "pvrd/ctl/main.py": MAIN,
            "pvrd-1.0.dist-info/entry_points.txt": ENTRIES,
        },
    )
    wheel(
        folder,
        "other",
        {
            "other-1.0.data/purelib/other/__init__.py": "",
            "other-1.0.data/scripts/other": "#!python\n",
        },
    )
    return folder


def system(what: str, dest: Path, *more: str | Path, ok: bool = True) -> str:
    done = subprocess.run(
        [PYTHON, TREE / "tools/install/system.py", what, "--destdir", dest, *map(str, more)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == ok, done.stderr
    return done.stdout + done.stderr


def below(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def install(dest: Path, wheels: Path, *more: str) -> set[str]:
    system("install", dest, "--wheels", wheels, "--python", PYTHON, *more)
    return below(dest)


def test_everything_lies_where_its_reader_looks(tmp_path: Path, wheels: Path) -> None:
    found = install(tmp_path / "d", wheels)
    for path in (
        "usr/local/bin/pvrd",
        "usr/local/bin/pvrctl",
        "usr/local/libexec/pvrd-worker",
        "usr/local/lib/pvrd/pvrd/ctl/main.py",
        "usr/local/lib/pvrd/other/__init__.py",
        "usr/local/lib/systemd/system/pvrd.service",
        "usr/local/lib/systemd/system/pvrd-worker-gpu@.service",
        "usr/local/lib/systemd/system/pvrd-worker-cpu.socket",
        "usr/local/bin/pvr-agent",
        "usr/local/lib/systemd/user/pvr-agent.service",
        "usr/local/lib/systemd/user-preset/80-pvr-agent.preset",
        "usr/local/bin/pvr-http",
        "usr/local/lib/systemd/user/pvr-http.service",
        "usr/local/lib/systemd/user-preset/80-pvr-http.preset",
        "usr/local/lib/sysusers.d/pvrd.conf",
        "usr/local/lib/tmpfiles.d/pvrd.conf",
        "etc/dbus-1/system.d/org.pvrd.Pvrd1.conf",
        "usr/local/share/dbus-1/system-services/org.pvrd.Pvrd1.service",
        "usr/local/share/dbus-1/interfaces/org.pvrd.Pvrd1.Manager.xml",
        "usr/share/polkit-1/actions/org.pvrd.Pvrd1.policy",
        "etc/pvrd/pvrd.toml",
        "usr/local/share/doc/pvrd/README.md",
        "usr/local/share/man/man1/pvrctl.1",
        "usr/local/share/man/man8/pvrd.8",
        "usr/local/share/bash-completion/completions/pvrctl",
    ):
        assert path in found
    assert "usr/local/lib/pvrd/bin" not in found, "scripts of dependencies serve nobody"
    unit = (tmp_path / "d/usr/local/lib/systemd/system/pvrd.service").read_text()
    assert "ExecStart=/usr/local/bin/pvrd --bus system\n" in unit


def test_prefix_usr_and_another_prefix(tmp_path: Path, wheels: Path) -> None:
    usr = install(tmp_path / "usr", wheels, "--prefix", "/usr")
    assert "usr/lib/systemd/system/pvrd.service" in usr
    assert "usr/share/dbus-1/system.d/org.pvrd.Pvrd1.conf" in usr
    assert not any(p.startswith(("usr/local", "etc/systemd", "etc/dbus-1")) for p in usr)
    opt = install(tmp_path / "opt", wheels, "--prefix", "/opt/pvrd")
    assert "opt/pvrd/bin/pvrctl" in opt
    # systemd, the bus and polkit know nothing of /opt
    assert "etc/systemd/system/pvrd.service" in opt
    assert "usr/share/dbus-1/system-services/org.pvrd.Pvrd1.service" in opt


def test_no_path_of_the_build_gets_in(tmp_path: Path, wheels: Path) -> None:
    dest = tmp_path / "d"
    for name in install(dest, wheels):
        if (dest / name).is_file() and not name.startswith("usr/local/share/doc"):
            data = (dest / name).read_bytes()
            assert str(tmp_path).encode() not in data, name
            assert str(TREE).encode() not in data, name


def test_launchers_are_isolated(tmp_path: Path, wheels: Path) -> None:
    dest = tmp_path / "d"
    # A prefix that exists under its own name, so that the launcher can be run as it is.
    prefix = tmp_path / "p"
    install(Path(dest), wheels, "--prefix", str(prefix))
    (dest / str(prefix).lstrip("/")).rename(prefix)
    done = subprocess.run(
        [prefix / "bin/pvrctl"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": "/nowhere"},
        cwd=tmp_path,
    )
    assert done.stdout == f"{prefix}/lib/pvrd 1\n", done.stderr


def test_uninstall_leaves_nothing(tmp_path: Path, wheels: Path) -> None:
    dest = tmp_path / "d"
    dest.mkdir()
    (dest / "usr/local/bin").mkdir(parents=True)
    (dest / "usr/local/bin/another").write_text("stays")
    before = below(dest)
    install(dest, wheels)
    install(dest, wheels)  # over the first
    assert "Removed pvrd." in system("uninstall", dest)
    assert below(dest) == before
    assert "not installed" in system("uninstall", dest)


def test_replacing_drops_files_of_the_old_version(tmp_path: Path, wheels: Path) -> None:
    dest = tmp_path / "d"
    install(dest, wheels)
    (wheels / "other-1.0-py3-none-any.whl").unlink()
    assert "usr/local/lib/pvrd/other" not in install(dest, wheels)


def test_changed_configuration_and_state_stay_unless_purged(tmp_path: Path, wheels: Path) -> None:
    dest = tmp_path / "d"
    install(dest, wheels)
    config = dest / "etc/pvrd/pvrd.toml"
    config.write_text("[cpu]\nthreads = 1\n")
    (dest / "var/lib/pvrd/models").mkdir(parents=True)
    install(dest, wheels)
    assert config.read_text() == "[cpu]\nthreads = 1\n"
    said = system("uninstall", dest)
    assert "/var/lib/pvrd" in said
    assert "/etc/pvrd" in said
    assert "PURGE=1" in said
    assert config.exists()
    install(dest, wheels)
    system("uninstall", dest, "--purge", "1")
    assert below(dest) <= {"etc", "var", "var/lib"}


def test_what_an_uninstall_left_can_be_purged(tmp_path: Path, wheels: Path) -> None:
    dest = tmp_path / "d"
    install(dest, wheels)
    (dest / "var/lib/pvrd/models").mkdir(parents=True)
    system("uninstall", dest)
    said = system("uninstall", dest, "--purge", "1")
    assert "Removed /var/lib/pvrd." in said
    assert below(dest) <= {"etc", "var", "var/lib"}
    assert "Removed" not in system("uninstall", dest, "--purge", "1")


def test_what_a_python_lacks_is_named(tmp_path: Path) -> None:
    module = runpy.run_path(str(TREE / "tools/install/system.py"))
    assert module["lacking"](sys.executable) == []
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    assert {"dbus-next", "numpy", "tokenizers", "vulkan"} <= set(module["lacking"](str(bare)))


def test_a_failed_installation_can_be_removed(tmp_path: Path, wheels: Path) -> None:
    dest = tmp_path / "d"
    (wheels / "pvrd-1.0-py3-none-any.whl").unlink()
    entries = {"pvrd-1.0.dist-info/entry_points.txt": "[console_scripts]\n"}
    wheel(wheels, "pvrd", {"pvrd/__init__.py": ""} | entries)
    system("install", dest, "--wheels", wheels, "--python", PYTHON, ok=False)
    assert json.loads((dest / "usr/local/lib/pvrd/installed.json").read_text())["files"]
    system("uninstall", dest)
    assert not any(p.is_file() for p in dest.rglob("*"))


@pytest.mark.parametrize(
    ("names", "words"),
    [(["other"], "no wheel of pvrd"), (["pvrd", "Pvrd"], "more than one wheel of pvrd")],
)
def test_folder_of_wheels_that_does_not_serve(tmp_path: Path, names: list[str], words: str) -> None:
    (tmp_path / "w").mkdir()
    for name in names:
        wheel(tmp_path / "w", name, {f"{name}/__init__.py": ""})
    dest = tmp_path / "d"
    dest.mkdir()
    said = system("install", dest, "--wheels", tmp_path / "w", "--python", PYTHON, ok=False)
    assert words in said
    assert below(dest) == set(), "nothing is begun"


def test_python_that_does_not_serve(tmp_path: Path, wheels: Path) -> None:
    said = system("install", tmp_path / "d", "--wheels", wheels, "--python", "/bin/true", ok=False)
    assert "no Python 3.11 or later" in said


@pytest.mark.parametrize(("venv", "wheels"), [("0", ""), ("1", ""), ("1", "/some/wheels")])
def test_no_python_is_told(tmp_path: Path, venv: str, wheels: str) -> None:
    options = {"PREFIX": "/usr", "DESTDIR": str(tmp_path), "VENV": venv, "MODELS": "0"}
    done = subprocess.run(
        [TREE / "tools/install/install"],
        env={"PATH": "/usr/bin:/bin", "WHEELS": wheels, "PYTHON": "/nowhere/python3", **options},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("There is no /nowhere/python3: install Python 3.11 or later")
    assert done.stdout == ""
