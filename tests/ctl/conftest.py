# SPDX-License-Identifier: Apache-2.0
"""pvrctl as a process, beside a private bus with the fake daemon of fake_pvrd.py on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.buses import ROOT, end, private_bus

FAKE = Path(__file__).with_name("fake_pvrd.py")
LIMIT_S = 60  # ends a broken test


class Fake:
    """The bus, the fake daemon, and pvrctl."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:path={folder}/bus"
        self._folder = folder
        self._stack = ExitStack()
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "PVRD_BUS": self.address}
        self.env |= {"PYTHONWARNINGS": "error", "XDG_STATE_HOME": str(folder / "state")}
        self.env.pop("PVRCTL_DEBUG", None)

    def __enter__(self) -> Fake:
        with ExitStack() as stack:
            stack.enter_context(private_bus(self._folder))
            self._daemon = self._start(stack, [sys.executable, str(FAKE), self.address])
            self._stack = stack.pop_all()
        return self

    def _start(self, stack: ExitStack, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.env)
        stack.callback(end, process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def expect(self, event: str, **values: Any) -> dict[str, Any]:
        """Reads what the daemon tells until it tells of `event` with these values."""
        assert self._daemon.stdout is not None
        for line in self._daemon.stdout:
            told: dict[str, Any] = json.loads(line)
            if told.pop("event") == event and values.items() <= told.items():
                return told
        raise AssertionError(f"the daemon ended without {event}")

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Starts pvrctl; options are those of Popen."""
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-m", "pvrd.ctl.main", *arguments]
        return subprocess.Popen(command, **{"env": self.env, **streams, **options})

    def run(self, *arguments: str, stdin: bytes = b"", **options: Any) -> Ended:
        """Runs pvrctl to its end."""
        with self.start(*arguments, **options) as process:
            out, err = process.communicate(stdin, timeout=LIMIT_S)
        return Ended(process.returncode, out or b"", (err or b"").decode())


class Ended:
    """How a run of pvrctl ended; no traceback is ever among it."""

    def __init__(self, code: int, out: bytes, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        assert "Traceback" not in err, err

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def json(self) -> Any:
        """Standard output, which is exactly one line of JSON."""
        assert self.out.count(b"\n") == 1, self.out
        return json.loads(self.out)

    def failed(self, code: int) -> str:
        """The one sentence of a failure with this exit code."""
        assert (self.code, self.err.count("\n")) == (code, 1), (self.code, self.err)
        assert self.err.startswith("pvrctl: ")
        return self.err.removeprefix("pvrctl: ").rstrip("\n")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    """One daemon for a file of tests."""
    with Fake(tmp_path_factory.mktemp("fake")) as started:
        yield started


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    """A daemon for one test, that may kill it."""
    with Fake(tmp_path_factory.mktemp("mortal")) as started:
        yield started
