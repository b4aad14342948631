# SPDX-License-Identifier: Apache-2.0
"""The packages on a booted system. Debian's are built from the source package in a room without
network, installed by apt, tried by debian/tests, removed, purged; then the RPMs, by Debian's rpm.

The tests are steps of one story and run in the order of this file, in one container.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.boot.conftest import USER, base_system, root

# All kernels are built in the first test's time: three minutes of a CPU, if it is free.
pytestmark = [pytest.mark.boot, pytest.mark.long, pytest.mark.timeout(2400)]

TREE = Path(__file__).resolve().parents[2]
LACKING = ("llguidance", "tokenizers", "vulkan")  # what Debian 12 has no packages of
INSTALLED = ("pvrd", "pvrd-wheels", "pvrd-models", "python3-pvrd", "pvrd-agent", "pvrd-http")
RPMS = ("pvrd", "pvrd-wheels", "pvrd-models", "python3-pvrd", "pvrd-agent")
APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y", "-o", "Dpkg::Use-Pty=0")
NO_MORE = "--no-install-recommends"


def host(*command: str | Path, timeout: float = 900.0, **more: str) -> None:
    """A command on this machine."""
    subprocess.run(
        command, stdin=subprocess.DEVNULL, check=True, timeout=timeout, env=os.environ | more
    )


@contextlib.contextmanager
def room(work: Path) -> Iterator[Path]:
    """A root folder of its own, not booted."""
    folder = work / "room"
    root("cp", "-a", "--reflink=auto", base_system(), folder, timeout=300)
    try:
        yield folder
    finally:
        root("rm", "-rf", folder, timeout=300)


def inside(folder: Path, *command: str, more: tuple[str, ...] = (), timeout: float = 900) -> str:
    """A command in the room, with this machine's network unless `more` takes it away."""
    nspawn = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--as-pid2", "--pipe"]
    where = [f"--directory={folder}", "--machine=pvrd-room", f"--bind={folder.parent}:/mnt/share"]
    return root(*nspawn, *where, *more, *command, timeout=timeout)


@pytest.fixture(scope="module")
def wheels(machine, collected):
    """A folder with the wheels of what Debian lacks."""
    folder = machine.folder / "wheels"
    folder.mkdir()
    for name in LACKING:
        (path,) = collected.glob(f"{name}-*.whl")
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def debs(machine, wheels):
    """The folder of the packages, as the container sees it: kernels and all from the source
    package, by an unprivileged user without network, with what Debian has to build with."""
    out = machine.folder / "debs"
    given = os.environ.get("PVRD_DEBS")  # a folder that tools/package/deb has filled
    if given:
        shutil.copytree(given, out)
        return out
    host(TREE / "tools/package/deb", "-S", out, wheels)
    (dsc,) = out.glob("*.dsc")
    out.chmod(0o777)
    (out / "build.log").unlink()
    with room(machine.folder) as folder:
        online = ("--resolv-conf=copy-host",)
        inside(folder, *APT, "update", more=online)
        inside(folder, *APT, "install", NO_MORE, "build-essential", more=online)
        inside(folder, *APT, "build-dep", NO_MORE, f"/mnt/share/debs/{dsc.name}", more=online)
        build = (
            "cd /mnt/share/debs && dpkg-source --no-check -x *.dsc source && cd source && "
            "dpkg-buildpackage -us -uc -b >../build.log 2>&1 || "
            "{ tail -n 30 ../build.log; exit 1; }"
        )
        offline = ("--private-network", f"--user={USER}")
        inside(folder, "nice", "sh", "-c", build, more=offline, timeout=1800)
    root("rm", "-rf", out / "source")
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
    online(machine, *APT, "install", NO_MORE, *files)
    assert machine.show("ActiveState") == "active"
    assert machine.show("UnitFileState") == "enabled"
    assert "clean" not in machine.text("dpkg", "--verify", *INSTALLED), "files as they were packed"


def test_the_packages_own_test(machine, debs):
    done = machine.run("sh", "/mnt/tree/debian/tests/service", timeout=300)
    said = done.stdout.decode()
    assert "beside a bicubic enlargement" in said
    assert "tokens by python3-pvrd" in said


def test_the_kernels_are_of_this_build(machine, debs):
    """SPIR-V and the library lie where the workers look; a debugger finds the library's symbols."""
    kernels = "/usr/lib/pvrd/kernels"
    listed = machine.text("dpkg", "--listfiles", "pvrd").splitlines()
    for name in ("libpvrkernels.so", "manifest.json", "matvec.q4.spv"):
        assert f"{kernels}/{name}" in listed
    if "PVRD_DEBS" not in os.environ:
        said = (debs / "build.log").read_text()
        assert "build_spirv.py" in said
        assert "-march" in said or "-mavx2" in said
        assert "-fstack-protector-strong" in said, "the distribution's flags"
        assert list(debs.glob("pvrd-dbgsym_*.deb"))


ASK = """
import json, sys, urllib.request
token = sys.argv[1]
def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": "Bearer " + token, "Content-Type": "application/json"}
    made = urllib.request.Request("http://127.0.0.1:8642/v1/" + path, data, headers)
    return urllib.request.urlopen(made, timeout=60).read().decode()
print(ask("models"))
turn = {"role": "user", "content": "Good morning"}
asked = {"model": "tiny", "messages": [turn], "max_tokens": 6, "stream": True}
print(ask("chat/completions", asked))
"""


def test_http_by_the_framework_that_debian_has(machine, until):
    """pvr-http, as the user's own service, on Debian's starlette and uvicorn."""
    machine.run("python3", "/mnt/tree/debian/tests/make_input.py", "/tmp/tiny.gguf", "/tmp/in.png")
    machine.run("pvrctl", "models", "add", "/tmp/tiny.gguf", "--name", "tiny")
    token = machine.text("pvr-http", "--print-token", user=USER)
    number = machine.text("id", "-u", USER)
    manager = ("env", f"XDG_RUNTIME_DIR=/run/user/{number}", "systemctl", "--user")
    machine.run("loginctl", "enable-linger", USER)
    unit = f"user@{number}.service"
    until("the user's manager runs", lambda: machine.show("ActiveState", unit) == "active")
    machine.run(*manager, "start", "pvr-http.service", user=USER)
    said = machine.text("python3", "-IBc", ASK, token, user=USER)
    machine.run(*manager, "stop", "pvr-http.service", user=USER)
    result = machine.text(*manager, "show", "-P", "Result", "pvr-http.service", user=USER)
    assert result == "success"
    machine.run("loginctl", "disable-linger", USER)
    assert '"id":"tiny"' in said
    assert said.endswith("data: [DONE]")
    assert "Traceback" not in machine.journal("--boot")
    machine.run("pvrctl", "models", "remove", "tiny")


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


def test_the_rpms_serve_too(machine, collected, wheels, debs):
    """Built by Debian's rpmbuild and installed by its rpm: there is no Fedora here. What they
    depend on was installed for the packages above; their names for it are Fedora's."""
    machine.run("rm", "-rf", "/var/lib/pvrd", "/etc/pvrd")
    out = machine.folder / "rpms"
    own = os.environ.get("PVRD_OWN") or str(collected)
    site = "python3_sitelib /usr/lib/python3/dist-packages"
    options = ("--nodeps", "--define", site)
    host(TREE / "tools/package/rpm", out, wheels, *options, PVRD_OWN=own, HOME=str(out))
    online(machine, *APT, "install", NO_MORE, "rpm")
    files = [
        f"/mnt/share/rpms/{path.name}"
        for path in sorted(out.glob("*.rpm"))
        if path.name.rsplit("-", 2)[0] in RPMS and not path.name.endswith(".src.rpm")
    ]
    assert len(files) == len(RPMS)
    machine.run("rpm", "--force-debian", "--install", "--nodeps", *files)
    assert machine.text("rpm", "--force-debian", "--verify", "--nodeps", *RPMS) == ""
    machine.run("systemctl", "daemon-reload")  # Fedora's systemd does so by itself
    assert machine.show("UnitFileState") == "enabled", "by the preset"
    said = machine.run("sh", "/mnt/tree/debian/tests/service", timeout=300).stdout.decode()
    assert "tokens by python3-pvrd" in said
    machine.run("rpm", "--force-debian", "--erase", "--nodeps", *RPMS)
    assert machine.show("LoadState") == "not-found"
    assert machine.text("find", "/usr", "/lib", "-name", "*pvr[d-]*") == ""
