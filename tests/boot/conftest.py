# SPDX-License-Identifier: Apache-2.0
"""A system for the boot tests: debootstrap once into a cache, a copy of it booted by nspawn."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TREE = Path(__file__).resolve().parents[2]
# No Mesa: the CPU serves here. The kernels link to libgomp1; `make install` needs make and python3.
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "libpam-systemd",
    "dbus",
    "polkitd",
    "python3",
    "libgomp1",
    "libudev1",
    "make",
)
USER = "tester"
NO_ROOT = "neither root nor sudo without a password"
NO_MOUNT = "this machine may not mount or make namespaces here"
SUDO = [] if os.geteuid() == 0 else ["sudo", "-n"]


def root(*command: str | Path, timeout: float = 60.0, check: bool = True) -> str:
    """Runs a command as root on this machine; stdout.

    Raises:
        AssertionError: it failed; the message has its output.
    """
    done = subprocess.run(
        [*SUDO, *map(str, command)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_until(what: str, true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Asks again and again until it is so.

    Raises:
        AssertionError: it is not so within that time.
    """
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


@pytest.fixture
def until() -> Callable[..., None]:
    """wait_until, for tests."""
    return wait_until


def release() -> tuple[str, str]:
    """This machine's distribution and its code name; Debian 12 where debootstrap knows neither.

    The same release, so that the wheels that were built here fit its Python.
    """
    words = platform.freedesktop_os_release()
    name, suite = words.get("ID", ""), words.get("VERSION_CODENAME", "")
    if name in ("debian", "ubuntu") and Path(f"/usr/share/debootstrap/scripts/{suite}").exists():
        return name, suite
    return "debian", "bookworm"


def base_system() -> Path:
    """The cached root folder; made on the first call, which takes a minute or two."""
    distribution, suite = release()
    key = hashlib.sha256(repr((PACKAGES, USER)).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("PVRD_BOOT_CACHE") or Path.home() / ".cache/pvrd")
    cache.mkdir(parents=True, exist_ok=True)
    base = cache / f"boot-{suite}-{platform.machine()}-{key}"
    with open(cache / "boot.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if base.is_dir():
            return base
        partial = base.with_suffix(".partial")
        root("rm", "-rf", partial)
        components = "main,universe" if distribution == "ubuntu" else "main"
        root(
            "debootstrap",
            "--variant=minbase",
            f"--components={components}",
            f"--include={','.join(PACKAGES)}",
            suite,
            partial,
            timeout=900,
        )
        root("chroot", partial, "useradd", "--create-home", USER)
        root("mkdir", "-p", partial / "var/log/journal")
        for unit in ("apt-daily.timer", "apt-daily-upgrade.timer", "console-getty.service"):
            root("ln", "-sf", "/dev/null", partial / "etc/systemd/system" / unit)
        for folder in ("var/cache/apt", "var/lib/apt/lists"):
            root("find", partial / folder, "-type", "f", "-delete")
        root("mv", partial, base)
    return base


class Container:
    """A booted system. Everything in it is a copy and goes away with it."""

    def __init__(self, leader: int, folder: Path) -> None:
        self.leader = leader
        self.folder = folder  # seen inside as /mnt/share

    def run(
        self,
        *command: str,
        user: str = "root",
        check: bool = True,
        timeout: float = 120.0,
        stdin: bytes = b"",
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a command inside; the environment is that of a fresh login.

        Raises:
            AssertionError: it failed and `check` is set.
        """
        done = subprocess.run(
            self.argv(*command, user=user),
            input=stdin,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            said = (done.stdout[-4000:] + done.stderr[-4000:]).decode(errors="replace")
            code = done.returncode
            raise AssertionError(f"{shlex.join(command)} -> {code}\n{said}\n{self.journal()}")
        return done

    def argv(self, *command: str, user: str = "root") -> list[str]:
        """The command of this machine that runs a command inside as that user."""
        home = "/root" if user == "root" else f"/home/{user}"
        become = (
            []
            if user == "root"
            else ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        )
        return [
            *SUDO,
            "nsenter",
            f"--target={self.leader}",
            "--all",
            "--",
            "env",
            "-i",
            f"HOME={home}",
            f"USER={user}",
            "LANG=C.UTF-8",
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            *become,
            *command,
        ]

    def text(self, *command: str, user: str = "root") -> str:
        return self.run(*command, user=user).stdout.decode().strip()

    def ctl(self, *arguments: str, timeout: float = 120.0) -> Any:
        """`pvrctl --json …` as the unprivileged user; the last object that it prints."""
        out = self.run("pvrctl", "--json", *arguments, user=USER, timeout=timeout).stdout.decode()
        try:
            return json.loads(out)
        except ValueError:
            return json.loads(out.strip().splitlines()[-1])

    def show(self, prop: str, unit: str = "pvrd.service") -> str:
        return self.text("systemctl", "show", "-P", prop, unit)

    def answers(self) -> bool:
        """Does the bus name answer, without being started for it?"""
        return (
            self.run(
                "busctl",
                "--auto-start=no",
                "call",
                "org.pvrd.Pvrd1",
                "/org/pvrd/Pvrd1",
                "org.freedesktop.DBus.Properties",
                "Get",
                "ss",
                "org.pvrd.Pvrd1.Manager",
                "Version",
                user=USER,
                check=False,
            ).returncode
            == 0
        )

    def journal(self, *match: str) -> str:
        match = match or ("--lines=60",)
        done = self.run("journalctl", "--no-pager", "-o", "short-monotonic", *match, check=False)
        return done.stdout.decode(errors="replace")


@contextlib.contextmanager
def booted(base: Path, work: Path) -> Iterator[Container]:
    """Boots a copy of `base` below `work`; the end of the block is the end of the container."""
    system, share = work / "system", work / "share"
    root("cp", "-a", "--reflink=auto", base, system, timeout=300)
    root("mkdir", "-m", "0777", share)
    # nspawn tells the socket that we name the pid of its init and forwards its READY=1.
    address = str(work / "notify")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
        open(work / "console", "wb") as console,
    ):
        notify.bind(address)
        notify.settimeout(120)
        nspawn = subprocess.Popen(
            [
                *SUDO,
                "setpriv",
                "--pdeathsig=TERM",  # a killed test run leaves no container behind
                "env",
                f"NOTIFY_SOCKET={address}",
                "systemd-nspawn",
                "--quiet",
                "--boot",
                f"--directory={system}",
                "--register=no",
                "--keep-unit",
                "--notify-ready=yes",
                "--private-network",
                "--machine=pvrd-boot",
                "--link-journal=no",
                "--console=pipe",
                f"--bind-ro={TREE}:/mnt/tree",
                f"--bind={share}:/mnt/share",
            ],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
        )
        leader = 0
        try:
            ready = False
            while not ready:
                try:
                    words = notify.recv(4096).decode().splitlines()
                except TimeoutError:
                    raise AssertionError((work / "console").read_text(errors="replace")) from None
                for word in words:
                    if word.startswith("X_NSPAWN_LEADER_PID="):
                        leader = int(word.partition("=")[2])
                    ready = ready or word == "READY=1"
            # Nobody reads what comes later (each reload says something), and a full queue would
            # hold nspawn up for ever.
            notify.close()
            yield Container(leader, share)
        finally:
            # Its init gone, everything in it is gone, and nspawn ends.
            if leader:
                root("kill", "-KILL", str(leader), check=False)
            else:
                nspawn.terminate()
            nspawn.wait(timeout=60)


@pytest.fixture(scope="module")
def machine() -> Iterator[Container]:
    """A booted system with nothing of pvrd in it yet."""
    if SUDO and (
        shutil.which("sudo") is None
        or subprocess.run([*SUDO, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip(NO_ROOT)
    probe = ["unshare", "--mount", "--pid", "--fork", "--net", "mount", "-ttmpfs", "none", "/mnt"]
    if subprocess.run([*SUDO, *probe], capture_output=True, check=False).returncode:
        pytest.skip(NO_MOUNT)
    base = base_system()
    # What runs that were killed have left
    root(
        "find",
        base.parent,
        "-maxdepth",
        "1",
        "-name",
        "work-*",
        "-mmin",
        "+600",
        "-exec",
        "rm",
        "-rf",
        "{}",
        "+",
    )
    work = Path(root("mktemp", "-d", base.with_name("work-XXXXXXXX")).strip())
    root("chmod", "0755", work)
    if SUDO:
        root("chown", str(os.getuid()), work)
    try:
        with booted(base, work) as container:
            yield container
    finally:
        root("rm", "-rf", work, timeout=600)
        shutil.rmtree(work, ignore_errors=True)
