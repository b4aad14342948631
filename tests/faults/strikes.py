# SPDX-License-Identifier: Apache-2.0
"""How a fault of the matrix is made to happen, and how it is taken back."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from pvrd.client import Client
from pvrd.errors import QuotaExceeded
from tests.faults.daemon import DAY_NS, Daemon, alive
from tests.faults.rows import Fault
from tests.faults.work import VIDEO


def strike(
    fault: Fault, daemon: Daemon, pid: int, models: Path, stack: ExitStack
) -> Callable[[], None]:
    """Has the fault happen to the worker `pid` or its daemon; what takes it back."""
    what, _, more = fault.strike.partition(":")
    if what == "signal":
        os.kill(pid, int(more))
    elif what == "arm":
        os.kill(pid, signal.SIGUSR2)
        return lambda: _disarm(pid)
    elif what == "memory":
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
        os.kill(pid, signal.SIGUSR2)
        return lambda: _free(pid)
    elif what == "compile":
        other = stack.enter_context(daemon.client())
        opened = stack.enter_context(other.open_video({**VIDEO, "model": "nsr-quality"}))
        return opened.close
    elif what == "udev":
        daemon.says(more)
        return lambda: daemon.says("add")
    elif what == "full":
        daemon.words(full=True)
        return lambda: _refuses_and_frees(daemon, models)
    elif what == "clock":
        daemon.words(ahead_ns=DAY_NS)
        return lambda: daemon.words()
    return lambda: None


def _disarm(pid: int) -> None:
    with suppress(ProcessLookupError):
        if alive([pid]):
            os.kill(pid, signal.SIGUSR2)


def _free(pid: int) -> None:
    with suppress(ProcessLookupError):
        every = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(pid, resource.RLIMIT_AS, every)
        os.kill(pid, signal.SIGUSR2)


def _refuses_and_frees(daemon: Daemon, models: Path) -> None:
    """A full disk: what has to be written is refused in a sentence, all else goes on."""
    with daemon.client() as client:
        with pytest.raises(QuotaExceeded, match="No space left"):
            client.set_config({"cpu.reserve": ("u", 1)})
        with pytest.raises(QuotaExceeded, match="No space left"):
            _adds(client, models)
    daemon.words()


def _adds(client: Client, models: Path) -> None:
    with (models / "tiny.gguf").open("rb") as file:
        list(client.add_model(file.fileno(), "another", {}))
