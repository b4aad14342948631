# SPDX-License-Identifier: Apache-2.0
"""pvr-http as a program, on a private bus with a daemon whose workers are fake, or real."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.buses import ROOT
from tests.daemons import Daemon, write_tiny
from tests.pvrd.conftest import bus, start

__all__ = ["bus", "start"]


class Server:
    """A running pvr-http: its address and its token, and the bus that it is on."""

    def __init__(
        self, base: str, token: str, process: subprocess.Popen[str], home: Path, bus: str
    ) -> None:
        self.base, self.token, self.process, self.home, self.bus = base, token, process, home, bus


@contextmanager
def serving(address: str, home: Path, *more: str) -> Iterator[Server]:
    """pvr-http on a free port."""
    env = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "JOURNAL_STREAM")}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env |= {"XDG_CONFIG_HOME": str(home), "PYTHONPATH": path}
    program = [sys.executable, "-m", "pvrd.http", "--bus", address, "--port", "0", *more]
    told = subprocess.run(
        [*program, "--print-token"], env=env, capture_output=True, text=True, check=True
    )
    with subprocess.Popen(program, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            found = re.search(r"http://\S+", line)
            assert found, line + process.stderr.read()
            yield Server(found[0], told.stdout.strip(), process, home, address)
        finally:
            process.terminate()
            said = process.stderr.read()
            process.wait(20)
        assert "Traceback" not in said, said


@pytest.fixture(scope="module")
def server(
    bus: str,
    start: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """pvr-http before fake workers, with one place."""
    start()
    with serving(bus, tmp_path_factory.mktemp("http"), "--sessions", "1") as made:
        yield made


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """pvr-http before a real CPU worker with a tiny model."""
    folder = tmp_path_factory.mktemp("real")
    models = folder / "models"
    models.mkdir()
    write_tiny(models)
    config = {"models.text": "tiny", "gpu.enabled": False, "sensors.system": False}
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(folder, models, config))
        daemon.client().close()
        yield stack.enter_context(
            serving(daemon.address, folder / "http", "--context", "128")
        )
