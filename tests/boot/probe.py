# SPDX-License-Identifier: Apache-2.0
"""Run within a unit's sandbox: tries what the unit must not be able to do; JSON of what it could.

python3 -I probe.py PID: the pid is of a process of root's. Only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)


def family(number: int, kind: int = socket.SOCK_DGRAM) -> None:
    socket.socket(number, kind).close()


def executable_memory() -> None:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def call(name: str, *arguments: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def write(path: str) -> None:
    with open(path, "x"):
        pass
    os.unlink(path)


TRIES: dict[str, Callable[[], object]] = {
    "inet": lambda: family(socket.AF_INET),
    "inet6": lambda: family(socket.AF_INET6),
    "packet": lambda: family(socket.AF_PACKET, socket.SOCK_RAW),
    "netlink": lambda: family(socket.AF_NETLINK, socket.SOCK_RAW),
    "vsock": lambda: family(socket.AF_VSOCK, socket.SOCK_STREAM),
    "home": lambda: os.listdir("/home/tester"),
    "root": lambda: os.listdir("/root"),
    "dri": lambda: os.close(os.open("/dev/dri/renderD128", os.O_RDONLY)),
    "bus": lambda: connect("/run/dbus/system_bus_socket"),
    "systemd": lambda: connect("/run/systemd/private"),
    "worker socket": lambda: os.stat("/run/pvrd/worker-cpu.socket"),
    "etc": lambda: write("/etc/pvrd-probe"),
    "usr": lambda: write("/usr/pvrd-probe"),
    "state": lambda: write("/var/lib/pvrd/probe"),
    "proc": lambda: open(f"/proc/{sys.argv[1]}/environ", "rb").close(),
    "other processes": lambda: os.stat(f"/proc/{sys.argv[1]}"),
    "memory": executable_memory,
    "namespace": lambda: call("unshare", 0x00020000),
    "user namespace": lambda: call("unshare", 0x10000000),
    "mount": lambda: call("mount", 0, 0, 0, 0, 0),
    "ptrace": lambda: call("ptrace", 16, int(sys.argv[1]), 0, 0),
    "uid": lambda: os.setuid(0),
    "kexec": lambda: call("reboot", 0),
}

if __name__ == "__main__":
    able = {}
    for name, attempt in TRIES.items():
        try:
            attempt()
            able[name] = ""
        except OSError as e:
            able[name] = e.strerror or "no"
    print("PROBE " + json.dumps(able))
