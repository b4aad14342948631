# SPDX-License-Identifier: Apache-2.0
"""A bus that lets every user in, pvrd with fake workers on it, and a caller who is another user."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.raw import Raw
from tests.pvrd.conftest import (  # noqa: F401  (fixtures)
    LONG,
    Caller,
    caller,
    callers,
    fake,
    lines,
    start,
    until,
)

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534

_BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>session</type><listen>unix:abstract={name}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="true"/>
<allow receive_sender="*" eavesdrop="true"/><allow own="*"/><allow user="*"/></policy>
</busconfig>
"""


@pytest.fixture(scope="session")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bus that is more lenient than any real one: it lets all listen to all."""
    folder = tmp_path_factory.mktemp("bus")
    conf, name = folder / "bus.conf", f"{folder}/bus"
    conf.write_text(_BUS.format(name=name))
    process = subprocess.Popen(
        ["dbus-daemon", f"--config-file={conf}", "--nofork", "--print-address=1"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline()
    yield f"unix:abstract={name}"
    process.terminate()
    process.wait(LONG)
    process.stdout.close()


class Stranger:
    """tests/hostile/stranger.py in another user's name, where this machine allows that.

    Root becomes nobody, others ask sudo; without it the stranger is another caller of the same
    user (`uid` says which it is), and what holds between users alone is not asked of it.
    """

    def __init__(self, bus: str, *arguments: str) -> None:
        become = [] if os.geteuid() == 0 else ["sudo", "-n"]
        able = not become or not subprocess.run(
            [*become, "true"], capture_output=True, check=False
        ).returncode
        self.uid = NOBODY if able else os.getuid()
        self._process = subprocess.Popen(
            [*(become if able else []), sys.executable, "-m", "tests.hostile.stranger",
             bus, str(self.uid), *arguments],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "there\n"

    def end(self) -> None:
        """Sends it away, if it is still there."""
        if self._process.poll() is None:
            self._process.kill()  # where sudo started it: the end of its input ends it
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(LONG)

    def go(self) -> Any:
        """Has it do what it came for; what it found."""
        out, _ = self._process.communicate("go\n", timeout=2 * LONG)
        assert self._process.returncode == 0
        return json.loads(out)


@pytest.fixture
def stranger(bus: str) -> Iterator[Callable[..., Stranger]]:
    with contextlib.ExitStack() as stack:

        def make(*arguments: str) -> Stranger:
            made = Stranger(bus, *arguments)
            stack.callback(made.end)
            return made

        yield make


@pytest.fixture
def raw(bus: str) -> Iterator[Callable[[], Raw]]:
    """Connections whose bytes are the test's."""
    made: list[Raw] = []

    def connect() -> Raw:
        made.append(Raw(bus))
        return made[-1]

    yield connect
    for connection in made:
        connection.close()
