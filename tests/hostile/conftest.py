# SPDX-License-Identifier: Apache-2.0
"""A bus that lets every user in, pvrd with fake workers on it, and a caller who is another user."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.buses import ROOT, private_bus
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

NOBODY = 65534

@pytest.fixture(scope="session")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a bus that is more lenient than any real one: it lets all listen to all."""
    folder = tmp_path_factory.mktemp("bus")
    # Abstract: another user finds no way through the folders of these tests.
    with private_bus(folder, f"unix:abstract={folder}/bus", eavesdrop=True) as address:
        yield address


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
