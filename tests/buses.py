# SPDX-License-Identifier: Apache-2.0
"""Buses of the tests' own, and what starts, waits for and ends the programs on them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pvrd.config import toml_value

ROOT = Path(__file__).resolve().parents[1]
WAIT_S = 60.0  # only ends a broken test

_BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>session</type><listen>{address}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="{eavesdrop}"/>
<allow receive_sender="*" eavesdrop="{eavesdrop}"/><allow own="*"/><allow user="*"/></policy>
</busconfig>
"""


def until(probe: Callable[[], Any], what: str = "the condition", seconds: float = WAIT_S) -> Any:
    """What the probe gives, as soon as that is something."""
    end = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < end, f"no sign of {what} in {seconds:g} s"
        select.select([], [], [], 0.01)
    return found


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process that was started here, if it has not ended; its output is no longer read."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@dataclass
class Bus:
    """A running dbus-daemon."""

    address: str
    process: subprocess.Popen[bytes]


@contextmanager
def started_bus(*options: str) -> Iterator[Bus]:
    """A bus, by default with the system's configuration of a session bus."""
    with ExitStack() as stack:
        command = ["dbus-daemon", "--nofork", "--nopidfile", "--print-address"]
        process = subprocess.Popen(
            [*command, *(options or ["--session"])],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(end, process)
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        assert address
        yield Bus(address, process)


@contextmanager
def private_bus(folder: Path, address: str = "", eavesdrop: bool = False) -> Iterator[str]:
    """A bus that lets every user do everything; its address, unix:path=FOLDER/bus if no other is
    given. `eavesdrop`: all may listen to all, as no real bus lets them.
    """
    address = address or f"unix:path={folder}/bus"
    conf = folder / "bus.conf"
    conf.write_text(_BUS.format(address=address, eavesdrop=str(eavesdrop).lower()))
    with started_bus(f"--config-file={conf}"):
        yield address


def environment(folder: Path, **more: str) -> dict[str, str]:
    """This process's, with pvrd's own folders below `folder`, and this source tree."""
    env = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "JOURNAL_STREAM")}
    for name in ("CONFIG", "STATE", "CACHE", "DATA"):
        env[f"XDG_{name}_HOME"] = str(folder / name.lower())
    return {**env, "PYTHONPATH": str(ROOT), **more}


def write_config(path: Path, settings: Mapping[str, Any]) -> None:
    """A pvrd.toml of keys `section.key`."""
    out: dict[str, list[str]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        out.setdefault(section, []).append(f"{name} = {toml_value(value)}")
    text = "".join(f"[{s}]\n" + "\n".join(rows) + "\n" for s, rows in out.items())
    path.write_text(text, encoding="utf-8")
