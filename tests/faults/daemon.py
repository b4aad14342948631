# SPDX-License-Identifier: Apache-2.0
"""A bus and a pvrd of our own that may be killed and started again, and what they hold."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pvrd.client import Client
from tests import buses
from tests.daemons import Workers
from tests.faults.work import WAIT_S

ROOT = buses.ROOT
NAMES = ("CACHE", "STATE", "CONFIG", "DATA")
DAY_NS = 86400 * 10**9

_BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>session</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="false"/>
<allow receive_sender="*"/><allow own="*"/><allow user="*"/></policy>
</busconfig>
"""


until = functools.partial(buses.until, seconds=WAIT_S)


def compiled_preload(folder: Path) -> Path:
    """preload.c as a library."""
    target = folder / "preload.so"
    source = Path(__file__).with_name("preload.c")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", str(target), str(source), "-ldl"],
        check=True,
    )
    return target


@dataclass
class Held:
    """What the processes hold at a moment: fds by kind, resident bytes, children, files."""

    fds: dict[str, Counter[str]]
    rss: dict[str, int]
    processes: int
    files: frozenset[str]


class Daemon(Workers):
    """pvrd on a bus of its own; `bed`: in a testbed of umockdev; `preload`: the library."""

    wait_s = WAIT_S

    def __init__(
        self, folder: Path, models: Path, config: Mapping[str, Any], *, preload: Path | None = None,
        bed: bool = False, environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.address = f"unix:path={folder}/bus"
        self.log = folder / "log"
        self._words = folder / "words"
        self._words.write_bytes(bytes(16))
        self._preload = preload
        self._bed = bed
        self._config = {"models.paths": [str(models)], "sensors.system": bed, **config}
        self._models = models
        self._environment = dict(environment or {})
        self.pid = 0
        self._process: subprocess.Popen[str] | None = None
        self._bus: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts both, or the one that is missing."""
        if self._bus is None:
            conf = self.folder / "bus.conf"
            conf.write_text(_BUS.format(path=self.folder / "bus"))
            self._bus = subprocess.Popen(
                ["dbus-daemon", f"--config-file={conf}", "--nofork", "--print-address=1"],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            assert self._bus.stdout is not None
            assert self._bus.stdout.readline()
        toml = self.folder / "pvrd.toml"
        buses.write_config(toml, self._config)
        env = {**os.environ, "PYTHONPATH": str(ROOT), **self._environment}
        env["MESA_SHADER_CACHE_DIR"] = str(self._models / "mesa")
        for name in NAMES:
            env[f"XDG_{name}_HOME"] = str(self.folder / "home" / name.lower())
        if self._preload is not None:
            env["LD_PRELOAD"] = str(self._preload)
            env["PVRD_FAULTS_FILE"] = str(self._words)
            env["PVRD_FAULTS_FOLDER"] = str(self.folder / "home")
        command = [sys.executable, "-m", "pvrd", "--bus", self.address, "--config", str(toml)]
        if self._bed:
            wrapped = ["umockdev-wrapper", sys.executable, "-m", "tests.faults.bed"]
            command = [*wrapped, *command]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if self._bed else log,
                stderr=log, env=env, text=True, cwd=ROOT,
            )  # fmt: skip
        self.pid = self._process.pid
        if self._bed:
            assert self._process.stdout is not None
            self.pid = int(self._process.stdout.readline())

    def says(self, word: str) -> None:
        """udev's word in the testbed."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def words(self, ahead_ns: int = 0, full: bool = False) -> None:
        """How far CLOCK_REALTIME is ahead, and whether the disk is full."""
        with self._words.open("r+b") as file:
            file.write(struct.pack("=qq", ahead_ns, int(full)))

    def kill_bus(self) -> None:
        """The bus dies."""
        assert self._bus is not None
        self._bus.kill()
        self._bus.wait()
        assert self._bus.stdout is not None
        self._bus.stdout.close()
        self._bus = None

    def ended(self) -> int:
        """Waits for the end of pvrd; its exit status."""
        assert self._process is not None
        status = self._process.wait(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process = None
        return status

    def stop(self) -> None:
        """Ends both."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            if self._bed and self._process.stdin is not None:
                self._process.stdin.close()
            self.ended()
        if self._bus is not None:
            self.kill_bus()

    def client(self) -> Client:
        """A connection, as soon as the daemon has its name."""
        found: Client = until(self._connect, "the daemon's name")
        return found

    def _connect(self) -> Client | None:
        assert self._process is not None
        assert self._process.poll() is None, self.text()
        try:
            return Client(self.address)
        except Exception:
            return None

    def text(self) -> str:
        """The journal so far."""
        return self.log.read_text(errors="replace")

    # -- what is held

    def held(self, client: Client) -> Held:
        """What pvrd and its workers hold now."""
        pids = {"pvrd": self.pid}
        for device in client.properties()["Devices"]:
            if device["pid"]:
                pids[device["kind"]] = device["pid"]
        return Held(
            {name: open_fds(pid) for name, pid in pids.items()},
            {name: resident(pid) for name, pid in pids.items()},
            len(children(self.pid)),
            frozenset(self._files()),
        )

    def _files(self) -> list[str]:
        home = self.folder / "home"
        return [str(p.relative_to(home)) for p in home.rglob("*") if p.is_file()]

    def leaks(self, client: Client, before: Held, grace_mib: int) -> str:
        """What is held now and was not before; "" when there is nothing."""
        now, found = self.held(client), []
        if jobs := client.jobs():
            found.append(f"{len(jobs)} jobs or sessions")
        for name in ("pvrd", "gpu", "cpu"):
            if name not in now.fds:
                found.append(f"there is no {name}")
                continue
            more = now.fds[name] - before.fds[name]
            # One of each model that was loaded since; they stay for models.keep_s.
            if more := Counter({f: n for f, n in more.items() if n > 1 or ".pvrm" not in f}):
                found.append(f"fds of {name}: {dict(more)}")
            if now.rss[name] > before.rss[name] + (grace_mib << 20):
                found.append(f"memory of {name}: {(now.rss[name] - before.rss[name]) >> 20} MiB")
        if now.processes != before.processes:
            found.append(f"{now.processes} processes, not {before.processes}")
        if more_files := [f for f in now.files - before.files if not known_file(f)]:
            found.append(f"files {more_files}")
        return "; ".join(found)

    def queue(self) -> dict[int, float]:
        """`queued` of pvrd, its workers and this process."""
        return queued([self.pid, *children(self.pid), os.getpid()])

    def settles(self, client: Client, before: Held, grace_mib: int) -> None:
        """Waits until nothing is held beyond what was before."""
        end = time.monotonic() + WAIT_S
        while leaks := self.leaks(client, before, grace_mib):
            assert time.monotonic() < end, leaks
            select.select([], [], [], 0.02)


def known_file(name: str) -> bool:
    """Caches that grow with use: compiled models, verdicts and times."""
    return bool(re.search(r"\.pvrm$|devices/[^/]*\.(json|times)$|config\.toml$", name))


def open_fds(pid: int) -> Counter[str]:
    """A process's open files by kind."""
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found[re.sub(r":?\[?\d{3,}\]?", "", os.readlink(f"/proc/{pid}/fd/{name}"))] += 1
    return found


def resident(pid: int) -> int:
    """Bytes."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def children(pid: int) -> list[int]:
    """Of a process, zombies too."""
    out = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) == pid:
                    out.append(int(entry))
    return out


def queued(pids: Sequence[int]) -> dict[int, float]:
    """Of processes: seconds that their threads have stood in the queue for a CPU so far. This is
    what a busy machine costs them, and no fault of theirs.
    """
    found: dict[int, float] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    waited = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[1]
                    found[pid] = found.get(pid, 0.0) + int(waited) / 1e9
    return found


def alive(pids: Sequence[int]) -> list[int]:
    """Those that are processes still."""
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}/fd")]
