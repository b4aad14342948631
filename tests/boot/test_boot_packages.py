# SPDX-License-Identifier: Apache-2.0
"""The Debian packages on a booted system: installed by apt, tried by debian/tests, removed, purged.

The tests are steps of one story and run in the order of this file, in one container.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.boot, pytest.mark.long]

TREE = Path(__file__).resolve().parents[2]
INSTALLED = ("pvrd", "pvrd-wheels", "pvrd-models", "python3-pvrd", "pvrd-agent")
APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", "-o", "Dpkg::Use-Pty=0")


@pytest.fixture(scope="module")
def debs(machine):
    """The folder of the packages, as the container sees it; pvrd itself from this tree's build."""
    wheels, out = machine.folder / "wheels", machine.folder / "debs"
    given = os.environ.get("PVRD_DEBS")  # a folder that tools/package/deb has filled
    if given:
        shutil.copytree(given, out)
    else:
        python = TREE / ".venv/bin/python"
        for command in (
            [TREE / "tools/install/wheels", TREE, wheels, "0", python],
            [TREE / "tools/package/deb", out, wheels],
        ):
            subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=900)
    return out


def online(machine, *command: str) -> str:
    """Runs a command inside, but with this machine's network, for what Debian's archive has."""
    argv = machine.argv(*command)
    argv[argv.index("--all")] = "--mount"
    argv[argv.index("--mount") : argv.index("--mount")] = ["--pid", "--ipc", "--uts"]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def test_apt_installs_and_the_service_runs(machine, debs):
    resolve = Path("/etc/resolv.conf").read_bytes()
    machine.run("sh", "-c", "rm -f /etc/resolv.conf; cat >/etc/resolv.conf", stdin=resolve)
    online(machine, *APT, "update")
    files = [
        f"/mnt/share/debs/{path.name}"
        for path in sorted(debs.glob("*.deb"))
        if path.name.split("_")[0] in INSTALLED
    ]
    assert len(files) == len(INSTALLED)
    online(machine, *APT, "install", "--no-install-recommends", *files)
    assert machine.show("ActiveState") == "active"
    assert machine.show("UnitFileState") == "enabled"
    assert "clean" not in machine.text("dpkg", "--verify", *INSTALLED), "files as they were packed"


def test_the_packages_own_test(machine, debs):
    done = machine.run("sh", "/mnt/tree/debian/tests/service", timeout=300)
    said = done.stdout.decode()
    assert "beside a bicubic enlargement" in said
    assert "tokens by python3-pvrd" in said


def test_a_hook_has_what_it_imports(machine, debs):
    (hooks,) = debs.glob("pvrd-hooks_*.deb")
    machine.run("dpkg", "--unpack", "--force-depends", f"/mnt/share/debs/{hooks.name}")
    program = "import pvrd.hooks.frames, pvrd.hooks.plain; print(pvrd.hooks.__file__)"
    assert machine.text("python3", "-IBc", program).startswith("/usr/lib/python3/dist-packages/")
    machine.run("dpkg", "--purge", "pvrd-hooks")


def test_purge_leaves_nothing(machine, debs):
    machine.run(*APT, "purge", *INSTALLED)
    folders = ("/etc", "/usr", "/lib", "/var", "/run")
    left = machine.text("find", *folders, "-name", "*pvr[d-]*").splitlines()
    assert [path for path in left if not path.startswith("/var/log/")] == []
    assert machine.run("getent", "passwd", "pvrd", check=False).returncode != 0
    assert machine.show("LoadState") == "not-found"
