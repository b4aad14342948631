# SPDX-License-Identifier: Apache-2.0
"""Workers that are units: pvrd connects to a socket and somebody else starts the program."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.bus
ROOT = Path(__file__).resolve().parents[2]


class Unit:
    """Does what a socket unit with Accept=yes does."""

    def __init__(self, path: Path, kind: str, program: list[str]) -> None:
        self.path = path
        self.kind = kind
        self.program = program
        self.children: list[subprocess.Popen[bytes]] = []
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.bind(str(path))
        self._sock.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._sock.accept()
            except OSError:
                return
            fd = connection.fileno()
            self.children.append(
                subprocess.Popen(
                    [*self.program, "--kind", self.kind, "--fd", str(fd)], pass_fds=[fd],
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )
            )  # fmt: skip
            connection.close()

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for child in self.children:
            child.kill()
            child.wait()


@pytest.fixture
def units(tmp_path: Path, fake: list[str]) -> Iterator[dict[str, Unit]]:
    made = {kind: Unit(tmp_path / f"worker-{kind}.socket", kind, fake) for kind in ("gpu", "cpu")}
    yield made
    for unit in made.values():
        unit.close()


def test_units(start: Any, callers: Any, lines: Any, until: Any, units: dict[str, Unit]) -> None:
    daemon = start(
        {
            "workers.gpu_socket": str(units["gpu"].path),
            "workers.cpu_socket": str(units["cpu"].path),
            "deadlines.slice_s": 2.0,  # a busy machine may let a worker wait
            "deadlines.ping_s": 0.1,
        }
    )
    caller = callers()
    caller.state("gpu")
    # The pid is the kernel's word.
    gpu, cpu = caller.get("Devices")
    assert gpu["pid"] == units["gpu"].children[0].pid
    assert cpu["pid"] == units["cpu"].children[0].pid
    session = caller.open_text()
    for fault, number in (("die:5", None), ("slow", signal.SIGSTOP)):
        pid = caller.get("Devices")[0]["pid"]
        stream = lines(caller.generate(session, fault, max_tokens=200))
        got = [stream.next() for _ in range(3)]
        if number is not None:
            os.kill(pid, number)
        got += stream.rest()
        tokens = [x["n"] for x in got if x["type"] == "token"]
        assert tokens == list(range(200))
        assert (got[-1]["type"], got[-1]["device"]) == ("end", "cpu")
        caller.state("gpu")
    # The stopped one was killed, not left behind.
    until(lambda: units["gpu"].children[1].poll() == -signal.SIGKILL)
    assert len(units["gpu"].children) == 3
    assert daemon.stop() == 0
    for unit in units.values():
        until(lambda unit=unit: unit.children[-1].poll() is not None)


def test_units_rest_by_the_end_of_their_socket(
    start: Any, callers: Any, lines: Any, until: Any, units: dict[str, Unit]
) -> None:
    """A hold and idleness end the program of a unit, without a kill, and the next job starts it."""
    start(
        {
            "workers.gpu_socket": str(units["gpu"].path),
            "workers.cpu_socket": str(units["cpu"].path),
            "workers.idle_s": 1.0,
            "models.keep_s": 0.1,
        }
    )
    caller = callers()
    reply = caller.call("Hold", "sa{sv}", ["a game", {}])
    fd = reply.fds.take(reply.body[0])
    caller.state("cpu")
    until(lambda: units["gpu"].children[0].poll() == 0, "its end, by itself")
    os.close(fd)
    caller.state("gpu")
    until(lambda: all(u.children[-1].poll() == 0 for u in units.values()), "both idle")
    assert [d["state"] for d in caller.get("Devices")] == ["asleep", "asleep"]
    said = lines(caller.generate(caller.open_text(device="gpu"), "x", max_tokens=2)).rest()
    assert said[-1]["device"] == "gpu"
    assert units["gpu"].children[-1].poll() is None


def test_no_units(start: Any, callers: Any, tmp_path: Path, lines: Any) -> None:
    start({"workers.gpu_socket": str(tmp_path / "none")})
    caller = callers()
    assert caller.get("State") == "cpu"
    assert "does not answer" in caller.get("Reason")
    got = lines(caller.generate(caller.open_text(), "x", max_tokens=2)).rest()
    assert got[-1]["device"] == "cpu"
