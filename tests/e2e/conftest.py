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

import gguf
import pytest

from pvrd.client import Client
from tests.engine.conftest import Shape, write_model

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
PROMPT = "Once upon a time"

_BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>session</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="false"/>
<allow receive_sender="*"/><allow own="*"/><allow user="*"/></policy>
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
            conf, toml = self.folder / "bus.conf", self.folder / "pvrd.toml"
            conf.write_text(_BUS.format(path=self.folder / "bus"))
            bus = subprocess.Popen(
                ["dbus-daemon", f"--config-file={conf}", "--nofork", "--print-address=1"],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            stack.callback(_end, bus)
            assert bus.stdout is not None
            assert bus.stdout.readline()
            toml.write_text(_toml({"models.paths": [str(self._models)], **self._config}))
            log = stack.enter_context(self.log.open("wb"))
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            # A software GPU compiles shaders slowly; its daemons share what the first has compiled.
            env["MESA_SHADER_CACHE_DIR"] = str(self._models / "mesa")
            for name in ("CACHE", "STATE", "CONFIG", "DATA"):
                env[f"XDG_{name}_HOME"] = str(self.folder / name.lower())
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pvrd", "--bus", self.address, "--config", str(toml)],
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
    """What the probe gives, as soon as that is something; the limit only ends a broken test."""
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


def write_tiny(folder: Path) -> None:
    """A tiny random llama, `tiny`, whose two best tokens lie at least 0.3 apart for 120 tokens.

    That is true of PROMPT. So its answers are equal on all devices.
    """
    path = write_model(folder / "tiny.gguf", "F16", Shape(context=256), seed=20)
    reader = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.name == "output_norm.weight":
            tensor.data[:] *= 20


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of models of all daemons."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder)
    return folder


@pytest.fixture
def daemon(tmp_path: Path, models: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts a daemon: daemon({"gpu.allow_software": True})."""
    with ExitStack() as stack:

        def start(config: Mapping[str, Any] | None = None) -> Daemon:
            return stack.enter_context(Daemon(tmp_path, models, config or {}))

        yield start
