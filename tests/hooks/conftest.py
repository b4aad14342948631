# SPDX-License-Identifier: Apache-2.0
"""The daemon of tests/client, and this tree's pvrctl in the PATH."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.buses import ROOT
from tests.daemons import Restartable

Shell = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def pvrd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restartable]:
    """One daemon for the tests of this folder; a test that stops it starts it again."""
    with Restartable(tmp_path_factory.mktemp("pvrd")) as started:
        yield started


@pytest.fixture
def environment(pvrd: Restartable, tmp_path: Path) -> dict[str, str]:
    """The bus, and pvrctl of this tree."""
    programs = tmp_path / "bin"
    programs.mkdir()
    script = programs / "pvrctl"
    run = shlex.join([sys.executable, "-P", "-m", "pvrd.ctl.main"])
    script.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT))} exec {run} "$@"\n')
    script.chmod(0o755)
    path = f"{programs}:{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PVRD_BUS": pvrd.address, "PATH": path}


@pytest.fixture
def shell(environment: dict[str, str], tmp_path: Path) -> Shell:
    """Runs a pipe in the test's folder; each of its programs has to end well."""

    def run(command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, env=environment, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done

    return run
