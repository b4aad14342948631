# SPDX-License-Identifier: Apache-2.0
"""A private bus with the real daemon and its real workers on it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pvrd.client import Client

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0

_BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>session</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="false"/><allow own="*"/></policy>
</busconfig>
"""


class Daemon:
    """pvrd on a bus of its own, with a configuration of its own; ends with the context."""

    def __init__(self, folder: Path, models: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.address = f"unix:path={folder}/bus"
        self.log = folder / "log"
        self._models = models
        self._config = config
        self._stack = ExitStack()

    def __enter__(self) -> Daemon:
        with ExitStack() as stack:
            (self.folder / "bus.conf").write_text(_BUS.format(path=self.folder / "bus"))
            bus = subprocess.Popen(
                ["dbus-daemon", f"--config-file={self.folder}/bus.conf", "--nofork", "--print-address=1"],
                stdout=subprocess.PIPE,
            )
            stack.callback(_end, bus)
            assert bus.stdout is not None
            assert bus.stdout.readline()
            (self.folder / "pvrd.toml").write_text(_toml({"models.paths": [str(self._models)], **self._config}))
            log = stack.enter_context(self.log.open("wb"))
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            for name in ("CACHE", "STATE", "CONFIG", "DATA"):
                env[f"XDG_{name}_HOME"] = str(self.folder / name.lower())
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pvrd", "--bus", self.address, "--config", f"{self.folder}/pvrd.toml"],
                stdout=log, stderr=log, env=env,
            )  # fmt: skip
            stack.callback(_end, self.process)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def client(self) -> Client:
        """A connection, as soon as the daemon has its name."""
        return until(self._connect, "the daemon's name")

    def _connect(self) -> Client | None:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return Client(self.address)
        except Exception:
            return None

    def device(self, client: Client, kind: str) -> dict[str, Any]:
        """A worker as the Manager shows it."""
        for device in client.properties()["Devices"]:
            if device["kind"] == kind:
                return dict(device)
        return {}

    def ready(self, client: Client, kind: str, generation: int = 1) -> dict[str, Any]:
        """Waits until a worker of at least this generation is ready."""

        def look() -> dict[str, Any] | None:
            device = self.device(client, kind)
            fine = device.get("state") == "ready" and device["generation"] >= generation
            return device if fine else None

        return until(look, f"a ready {kind} worker of generation {generation}")


def until(probe: Callable[[], Any], what: str) -> Any:
    """What the probe gives, as soon as that is something. The time limit only ends a broken test."""
    end = time.monotonic() + WAIT_S
    while not (found := probe()):
        assert time.monotonic() < end, f"no sign of {what}"
        select.select([], [], [], 0.02)
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _toml(values: Mapping[str, Any]) -> str:
    tables: dict[str, list[str]] = {}
    for key, value in values.items():
        table, _, name = key.partition(".")
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        tables.setdefault(table, []).append(f"{name} = {text}")
    return "\n".join(f"[{t}]\n" + "\n".join(lines) for t, lines in tables.items()) + "\n"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons: daemon({"gpu.allow_software": True}) with the tiny model as `tiny`."""
    with ExitStack() as stack:

        def start(config: Mapping[str, Any] | None = None) -> Daemon:
            return stack.enter_context(Daemon(tmp_path, tmp_path, config or {}))

        yield start
