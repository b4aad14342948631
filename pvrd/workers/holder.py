# SPDX-License-Identifier: Apache-2.0
"""One holder a device: a second pvrd finds the first one's lock and leaves the GPU alone.

The lock is a flock on the device's own node, the one place that daemons of all buses, users and
sandboxes share. It ends with the process that has it, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

# What drivers open for one device alone; /dev/nvidiactl, say, is common to all of them.
_NODES = re.compile(r"/dev/(dri/renderD\d+|nvidia\d+)")
# A predecessor that was killed gives its lock up only when it is gone altogether.
WAIT_S = 3.0
_STEP_S = 0.05


def open_nodes(fds: Path = Path("/proc/self/fd")) -> set[str]:
    """The device nodes that this process has open."""
    found = set()
    for fd in fds.iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(fd)
            if _NODES.fullmatch(target):
                found.add(target)
    return found


def claim(nodes: Iterable[str], wait_s: float | None = None) -> str:
    """Locks the nodes until this process ends. "" when they are ours, else why not. Waits
    WAIT_S at most.

    A node that cannot be opened or locked at all is left out: a lock that nobody can take holds
    nobody off.
    """
    end = time.monotonic() + (WAIT_S if wait_s is None else wait_s)
    for node in sorted(nodes):
        try:
            fd = os.open(node, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break  # the descriptor stays open, and with it the lock
            except BlockingIOError:
                if time.monotonic() >= end:
                    who = "".join(f" (process {pid})" for pid in _lockers(fd))
                    os.close(fd)
                    return f"another pvrd{who} holds {node}"
                time.sleep(_STEP_S)
            except OSError:
                os.close(fd)
                break
    return ""


def _lockers(fd: int, locks: Path = Path("/proc/locks")) -> Iterator[int]:
    """Who has a flock on this file, where the kernel lets us see it."""
    status = os.fstat(fd)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in locks.read_text().splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == place:
                yield int(fields[4])
