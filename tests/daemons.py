# SPDX-License-Identifier: Apache-2.0
"""Daemons with real workers, each on a bus of its own, and a small model for them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import gguf

from pvrd.client import Client
from tests.buses import WAIT_S, end, environment, private_bus, until, write_config
from tests.engine.conftest import Shape, write_model

PROMPT = "Once upon a time"  # write_tiny() is made for it


class Workers:
    """What a daemon's workers are, and when they are ready."""

    wait_s = WAIT_S

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

        what = f"a ready {kind} worker of generation {generation}"
        found: dict[str, Any] = until(look, what, self.wait_s)
        return found


class Daemon(Workers):
    """pvrd with its real workers on a bus of its own, which outlives it; both end with the
    context.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path, models: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.address = f"unix:path={folder}/bus"
        self.log = folder / "log"
        self._models = models
        self._config = config
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(private_bus(self.folder))
            write_config(
                self.folder / "pvrd.toml", {"models.paths": [str(self._models)], **self._config}
            )
            self.log.write_bytes(b"")
            stack.callback(self.stop)
            self.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Starts it, again where it was stopped."""
        # A software GPU compiles shaders slowly; its daemons share what the first has compiled.
        env = environment(self.folder, MESA_SHADER_CACHE_DIR=str(self._models / "mesa"))
        config = ["--config", str(self.folder / "pvrd.toml")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pvrd", "--bus", self.address, *config],
                stdout=log, stderr=log, env=env,
            )  # fmt: skip

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ends it by a signal. A second time is no error."""
        if self.running:
            self.process.send_signal(number)
        end(self.process)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def client(self) -> Client:
        """A connection, as soon as the daemon has its name."""
        client: Client = until(self._connect, "the daemon's name")
        return client

    def _connect(self) -> Client | None:
        assert self.running, self.log.read_text()
        try:
            return Client(self.address)
        except Exception:
            return None


class Restartable(Daemon):
    """A daemon on the CPU alone; start() returns when it can work."""

    def __init__(self, folder: Path) -> None:
        (folder / "models").mkdir()
        write_tiny(folder / "models")
        super().__init__(folder, folder / "models", {"gpu.enabled": False})

    def start(self) -> None:
        super().start()
        with self.client() as client:
            until(lambda: client.properties()["State"] == "cpu", "a ready daemon")


def write_tiny(folder: Path) -> None:
    """A tiny random llama, `tiny`, whose two best tokens lie at least 0.3 apart for 120 tokens.

    That is true of PROMPT. So its answers are equal on all devices.
    """
    path = write_model(folder / "tiny.gguf", "F16", Shape(context=256), seed=20)
    reader = gguf.GGUFReader(path, "r+")
    for tensor in reader.tensors:
        if tensor.name == "output_norm.weight":
            tensor.data[:] *= 20
