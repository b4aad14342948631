# SPDX-License-Identifier: Apache-2.0
"""systemd, all of it: notifications and the journal. The only file that imports systemd-python.

Without that package (or outside of a unit) notifications are datagrams written by hand and the
journal is standard error, which systemd reads too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
from typing import Any

ERROR, WARNING, NOTICE, INFO = 3, 4, 5, 6

# One id for each event, for `journalctl MESSAGE_ID=…`.
MESSAGE_STARTED = "7b1f0d3a5f5c4b0c9a0e3b6b8a1f4c01"
MESSAGE_WORKER_LOST = "7b1f0d3a5f5c4b0c9a0e3b6b8a1f4c02"
MESSAGE_WORKER_READY = "7b1f0d3a5f5c4b0c9a0e3b6b8a1f4c03"
MESSAGE_WORKER_ABSENT = "7b1f0d3a5f5c4b0c9a0e3b6b8a1f4c04"
MESSAGE_JOB_FAILED = "7b1f0d3a5f5c4b0c9a0e3b6b8a1f4c05"
MESSAGE_DECISION = "7b1f0d3a5f5c4b0c9a0e3b6b8a1f4c06"
MESSAGE_WORKER_RESTS = "7b1f0d3a5f5c4b0c9a0e3b6b8a1f4c07"
MESSAGE_SUSPEND = "7b1f0d3a5f5c4b0c9a0e3b6b8a1f4c08"


def _load(name: str) -> Any:
    try:
        return importlib.import_module(f"systemd.{name}")
    except ImportError:
        return None


_journal: Any = _load("journal") if "JOURNAL_STREAM" in os.environ else None


def log(level: int, message: str, **fields: str) -> None:
    """One line to the journal with fields (MESSAGE_ID, PVRD_*), or to standard error.

    Never pass a prompt, an answer or an exception's text that may hold one.
    """
    if _journal is not None:
        _journal.send(message, PRIORITY=str(level), SYSLOG_IDENTIFIER="pvrd", **fields)
        return
    prefix = f"<{level}>" if "JOURNAL_STREAM" in os.environ else "pvrd: "
    with contextlib.suppress(OSError, ValueError):  # a closed standard error is no reason to fail
        print(prefix + " ".join(message.splitlines()), file=sys.stderr, flush=True)


def notify(**fields: str | int) -> None:
    """Tells the service manager: READY=1, STATUS=…, WATCHDOG=1, STOPPING=1, RELOADING=1."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    text = "\n".join(f"{k}={v}" for k, v in fields.items())
    package = _load("daemon")
    if package is not None:
        package.notify(text)
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(text.encode(), address)
        except OSError as e:
            log(WARNING, f"the service manager does not listen: {e.strerror}")


def watchdog_s() -> float | None:
    """How often the service manager wants to hear WATCHDOG=1: half its limit. None: not at all."""
    try:
        limit = int(os.environ.get("WATCHDOG_USEC", "0"))
        pid = int(os.environ.get("WATCHDOG_PID", str(os.getpid())))
    except ValueError:
        return None
    return limit / 2e6 if limit > 0 and pid == os.getpid() else None
