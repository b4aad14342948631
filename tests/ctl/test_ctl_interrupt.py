# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C where no job runs yet: while Python imports, while the bus is silent, inside a call."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pvrd.client import Client, NoDaemon
from pvrd.ctl import status
from pvrd.ctl.main import main

_EARLY = """
import os, signal, sys
sys.argv[0] = "/usr/bin/pvrctl"
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
import pvrd.ctl
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(("how", "code"), [("default", -signal.SIGINT), ("ignored", 0)])
def test_ctrl_c_during_the_imports_is_silent(how: str, code: int) -> None:
    command = [sys.executable, "-c", _EARLY, how]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_ctrl_c_while_the_bus_is_silent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "bus"))
        listening.listen()
        env = {**os.environ, "PVRD_BUS": f"unix:path={tmp_path}/bus"}
        command = [sys.executable, "-m", "pvrd.ctl.main", "status"]
        with (
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as process,
            listening.accept()[0] as bus,
        ):
            bus.recv(1)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130


@pytest.mark.bus
def test_a_call_that_was_broken_off_ends_the_connection(fake) -> None:
    """Also where the interrupt took away what was to wake the call."""

    async def asleep() -> None:
        while True:
            try:
                await asyncio.Future()
            except asyncio.CancelledError:
                continue

    def interrupt() -> None:
        raise KeyboardInterrupt

    client = Client(fake.address)
    assert client.properties()
    client._loop.call_soon(interrupt)
    with pytest.raises(KeyboardInterrupt):
        client._wait(asleep())
    with pytest.raises(NoDaemon):
        client.properties()
    client.close()


def test_ctrl_c_in_the_making_of_something_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loop of asyncio that is half made cannot be closed, which it tries when it is collected."""

    class HalfMade:
        def __init__(self) -> None:
            raise KeyboardInterrupt

        def __del__(self) -> None:
            raise AttributeError("what __init__ did not come to")

    monkeypatch.setattr(status, "run", lambda _args: HalfMade())
    assert main(["status"]) == 130
    assert capsys.readouterr() == ("", "")
