# SPDX-License-Identifier: Apache-2.0
"""Pressure stall information: the share of time in which tasks waited for CPU, memory or I/O.

The kernel's averages are read when somebody asks. While work runs, triggers tell of a stall as it
happens: a process without privileges may have them since Linux 6.4, with windows of 2 s.
Source: the kernel's Documentation/accounting/psi.rst.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
from collections.abc import Callable
from pathlib import Path

from pvrd.sensors.reading import Reading, text, unknown

KINDS = ("cpu", "memory", "io")
# Of each 2 s: 300 ms in which some task waited for a CPU, 100 ms for memory, 200 ms for I/O.
TRIGGERS = {"cpu": 300_000, "memory": 100_000, "io": 200_000}
WINDOW_US = 2_000_000


class Pressure:
    """PSI of the whole machine. `on_stall` gets cpu, memory or io when its trigger fires."""

    def __init__(
        self, on_stall: Callable[[str], None], folder: Path = Path("/proc/pressure")
    ) -> None:
        self._on_stall = on_stall
        self._folder = folder
        self._fds: dict[int, str] = {}
        self._poll: select.epoll | None = None
        self.refused = ""  # why there are no triggers

    def readings(self) -> list[Reading]:
        """psi_cpu, psi_memory, psi_io: percent of the last 10 s in which some task waited."""
        out = []
        for kind in KINDS:
            value = some_avg10(text(self._folder / kind) or "")
            name, path = f"psi_{kind}", str(self._folder / kind)
            if value is None:
                out.append(unknown(name, f"{path} cannot be read (CONFIG_PSI, psi=1)", "%"))
            else:
                out.append(Reading(name, value, path, "%"))
        return out

    def watch(self) -> None:
        """Sets the triggers; a second time does nothing. `refused` says why there are none."""
        if self._poll is not None:
            return
        self.refused = ""
        poll = select.epoll()
        for kind in KINDS:
            fd = -1
            try:
                fd = os.open(self._folder / kind, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                os.write(fd, f"some {TRIGGERS[kind]} {WINDOW_US}\0".encode())
                poll.register(fd, select.EPOLLPRI)
            except OSError as e:
                if fd >= 0:
                    os.close(fd)
                self.refused = self.refused or _why(self._folder / kind, e)
                continue
            self._fds[fd] = kind
        if not self._fds:
            poll.close()
            return
        self._poll = poll
        # asyncio waits for readability alone; an epoll in it is readable when it has an event.
        asyncio.get_running_loop().add_reader(poll.fileno(), self._fired)

    def ignore(self) -> None:
        """Takes the triggers away."""
        if self._poll is None:
            return
        asyncio.get_running_loop().remove_reader(self._poll.fileno())
        self._poll.close()
        self._poll = None
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    @property
    def watching(self) -> list[str]:
        """The kinds that have a trigger now."""
        return sorted(self._fds.values())

    def _fired(self) -> None:
        if self._poll is None:
            return
        for fd, events in self._poll.poll(0):
            kind = self._fds[fd]
            if events & select.EPOLLERR:  # the kernel took the trigger back
                with contextlib.suppress(OSError):
                    self._poll.unregister(fd)
                os.close(fd)
                del self._fds[fd]
                continue
            self._on_stall(kind)


def some_avg10(content: str) -> float | None:
    """Percent out of the line `some avg10=0.12 avg60=… total=…`; None when there is none."""
    for line in content.splitlines():
        words = line.split()
        if words[:1] != ["some"]:
            continue
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key == "avg10":
                with contextlib.suppress(ValueError):
                    return float(value)
    return None


def _why(path: Path, e: OSError) -> str:
    if e.errno == errno.ENOENT:
        return f"{path} is not there"
    if e.errno in (errno.EPERM, errno.EACCES, errno.EINVAL):
        return "the kernel gives triggers to the privileged alone (before Linux 6.4)"
    return f"{path}: {e.strerror}"
