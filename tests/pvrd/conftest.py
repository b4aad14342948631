# SPDX-License-Identifier: Apache-2.0
"""A private bus, a daemon on it whose workers are fake, and a blocking caller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pvrd.bus import PROPERTIES, BusAddress, BusError, Connection, Reply
from pvrd.bus_values import plain, variant
from tests.buses import environment as own_environment
from tests.buses import started_bus, write_config
from tests.buses import until as wait_for

FAKE = Path(__file__).with_name("fake_worker.py")
NAME = "org.pvrd.Pvrd1"
PATH = "/org/pvrd/Pvrd1"
MANAGER = f"{NAME}.Manager"
TEXT = f"{NAME}.TextSession"
VIDEO = f"{NAME}.VideoSession"
LONG = 30.0  # a bound on waiting; a test that meets it has failed


class Caller:
    """A connection to the private bus, used without async."""

    def __init__(self, address: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.connection = self.loop.run_until_complete(
            Connection.connect(BusAddress.parse(address))
        )

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def call(
        self, member: str, signature: str = "", body: Sequence[Any] = (), fds: Sequence[int] = (),
        path: str = PATH, interface: str = MANAGER, timeout: float = LONG,
    ) -> Reply:  # fmt: skip
        reply: Reply = self.run(
            self.connection.call(NAME, path, interface, member, signature, body, fds, timeout)
        )
        return reply

    def fails(self, *args: Any, **kwargs: Any) -> tuple[str, str]:
        """The short name and the sentence of the error that a call gets."""
        with pytest.raises(BusError) as caught:
            self.call(*args, **kwargs)
        assert "Traceback" not in caught.value.message
        assert 'File "' not in caught.value.message
        return caught.value.name.rsplit(".", 1)[1], caught.value.message

    def get(self, name: str, path: str = PATH, interface: str = MANAGER) -> Any:
        reply = self.call("Get", "ss", [interface, name], path=path, interface=PROPERTIES)
        return plain(reply.body[0])

    def options(self, **values: Any) -> dict[str, Any]:
        return {key: variant(value) for key, value in values.items()}

    def open_text(self, **options: Any) -> str:
        return str(self.call("OpenText", "a{sv}", [self.options(**options)]).body[0])

    def generate(self, session: str, prompt: str, **options: Any) -> int:
        reply = self.call(
            "Generate", "sa{sv}", [prompt, self.options(**options)], path=session, interface=TEXT
        )
        return reply.fds.take(reply.body[0])

    def state(self, wanted: str) -> None:
        wait_for(lambda: self.get("State") == wanted, f"state {wanted}")

    def close(self) -> None:
        self.connection.close()
        self.run(asyncio.sleep(0))
        self.loop.close()


class Lines:
    """Reads a stream line by line."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._buffer = b""

    def next(self) -> dict[str, Any] | None:
        """The next line, None at the end of the file."""
        while b"\n" not in self._buffer:
            assert select.select([self.fd], [], [], LONG)[0], "nothing came"
            piece = os.read(self.fd, 65536)
            if not piece:
                assert not self._buffer, "a torn line"
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        assert len(line) < 4096
        value: dict[str, Any] = json.loads(line)
        return value

    def rest(self) -> list[dict[str, Any]]:
        """All lines to the end of the file."""
        out = []
        while (line := self.next()) is not None:
            out.append(line)
        os.close(self.fd)
        return out


class Daemon:
    """A running pvrd."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, folder: Path) -> None:
        self.process = process
        self.log = log
        self.folder = folder

    def text(self) -> str:
        return self.log.read_text()

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(LONG)


@pytest.fixture(scope="session")
def bus() -> Iterator[str]:
    """The address of a private bus."""
    with started_bus() as made:
        yield made.address


@pytest.fixture(scope="session")
def lines() -> type[Lines]:
    return Lines


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    return wait_for


@pytest.fixture(scope="session")
def fake() -> list[str]:
    """The program of the fake worker."""
    return [sys.executable, str(FAKE)]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Of daemons with fake workers: no models but their own."""
    own = {"XDG_DATA_DIRS": str(folder / "none"), "PYTHONWARNINGS": "error"}
    return own_environment(folder, **{**own, **more})


@pytest.fixture(scope="module")
def start(bus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Daemon]]:
    """Starts daemons with fake workers; all are stopped, and their logs looked at, in the end."""
    started: list[Daemon] = []

    def make(settings: Mapping[str, Any] | None = None, arguments: Sequence[str] = (),
             folder: Path | None = None, **env: str) -> Daemon:  # fmt: skip
        for daemon in started:
            daemon.stop()  # the bus has one name
        folder = folder or tmp_path_factory.mktemp("pvrd")
        models = folder / "data" / "pvrd" / "models"
        models.mkdir(parents=True, exist_ok=True)
        (models / "fake text.gguf").write_bytes(b"GGUF and no more")
        (models / "fake-x2.pvrm").write_bytes(b"PVRM1\0\0\0" + bytes(8))
        (models / "broken.gguf").write_bytes(b"nothing of the kind")
        config = folder / "pvrd.toml"
        write_config(
            config,
            {
                "workers.program": [sys.executable, str(FAKE), *arguments],
                "workers.backoff_s": 0.05,
                "models.text": "fake-text",
                "models.video": "fake-x2",
                "sensors.system": False,  # what the machine is doing is no part of most tests
                **(settings or {}),
            },
        )
        log = folder / f"log{len(started)}"
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pvrd", "--bus", bus, "--config", str(config)],
                stderr=file, cwd=folder, env=environment(folder, **env),
            )  # fmt: skip
        daemon = Daemon(process, log, folder)
        started.append(daemon)

        def up() -> bool:
            assert process.poll() is None, log.read_text()
            return "ready, " in log.read_text()

        wait_for(up, "readiness")
        return daemon

    yield make
    for daemon in started:
        daemon.stop()
        assert "Traceback" not in daemon.text()
        assert "Warning" not in daemon.text(), daemon.text()
        assert "fault of its own" not in daemon.text(), daemon.text()
        assert "a task failed" not in daemon.text(), daemon.text()


@pytest.fixture
def caller(bus: str) -> Iterator[Caller]:
    client = Caller(bus)
    yield client
    client.close()


@pytest.fixture
def callers(bus: str) -> Iterator[Callable[[], Caller]]:
    """More callers; closed in the end."""
    with contextlib.ExitStack() as stack:

        def make() -> Caller:
            client = Caller(bus)
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture(scope="session")
def kill() -> Callable[[int, int], None]:
    def send(pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    return send
