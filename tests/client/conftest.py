# SPDX-License-Identifier: Apache-2.0
"""A bus that outlives its daemon: the real one, stopped and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pvrd.client import Client
from tests.e2e.conftest import ROOT, _end, until, write_tiny

_BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>session</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="false"/>
<allow receive_sender="*"/><allow own="*"/><allow user="*"/></policy>
</busconfig>
"""


class Restartable:
    """A private bus and a daemon on it, on the CPU alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix:path={folder}/bus"
        self._stack = ExitStack()
        self.process: subprocess.Popen[bytes] | None = None
        (folder / "models").mkdir()
        write_tiny(folder / "models")
        (folder / "pvrd.toml").write_text(
            f"[models]\npaths = ['{folder}/models']\n[gpu]\nenabled = false\n"
        )

    def __enter__(self) -> Restartable:
        conf = self.folder / "bus.conf"
        conf.write_text(_BUS.format(path=self.folder / "bus"))
        bus = subprocess.Popen(
            ["dbus-daemon", f"--config-file={conf}", "--nofork", "--print-address=1"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._stack.callback(_end, bus)
        self._stack.callback(self.stop)
        assert bus.stdout is not None
        assert bus.stdout.readline()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """A daemon; returns when it has its name and a worker."""
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        for name in ("CACHE", "STATE", "CONFIG", "DATA"):
            env[f"XDG_{name}_HOME"] = str(self.folder / name.lower())
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pvrd", "--bus", self.address,
                 "--config", str(self.folder / "pvrd.toml")],
                stdout=log, stderr=log, env=env,
            )  # fmt: skip
        until(self._ready, "a ready daemon")

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            with Client(self.address) as client:
                return client.properties()["State"] == "cpu"
        except Exception:
            return False

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ends the daemon."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(number)
            self.process.wait(30)
            self.process = None


@pytest.fixture(scope="session")
def pvrd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    """One daemon for the tests of a folder; a test that stops it starts it again."""
    with Restartable(tmp_path_factory.mktemp("pvrd")) as started:
        yield started
