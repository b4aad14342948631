# SPDX-License-Identifier: Apache-2.0
"""tools/with-pvrd with the real daemon: what the command sees, exit codes, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITH_PVRD = str(ROOT / "tools/with-pvrd")

pytestmark = pytest.mark.bus


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [WITH_PVRD, *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )


def test_the_command_sees_the_daemon(tmp_path: Path) -> None:
    config = tmp_path / "a b.toml"
    config.write_text('cpu.threads = 1\nmodels.paths = ["/no such"]\n[gpu]\nenabled = false\n')
    script = 'pvrctl status --json && pvrctl --json config && echo "$PVRD_BUS" && exit 7'
    for more in ([], ["--allow-software"]):
        done = run(*more, "--config", str(config), "sh", "-c", script)
        assert done.returncode == 7, done.stderr
        status, values, address = done.stdout.splitlines()
        assert json.loads(status)["state"] == "cpu"
        found = json.loads(values)
        assert (found["cpu.threads"], found["models.paths"]) == (1, ["/no such"])
        assert found["gpu.allow_software"] is bool(more)
        assert not Path(address.removeprefix("unix:path=")).exists()


def test_a_daemon_that_does_not_start(tmp_path: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text("[cpu]\nthreads = 'many'\n")
    done = run("--config", str(config), "true")
    assert done.returncode == 125
    assert "pvrd did not start" in done.stderr
    assert "ended by itself" not in done.stderr
    assert "threads" in done.stderr
    done = run("--allow-software", "--config", str(tmp_path / "none"), "true")
    assert done.returncode == 125
    assert "none cannot be read" in done.stderr


def test_a_command_that_is_none_and_the_log() -> None:
    done = run("--keep-log", "/no/such/program")
    assert done.returncode == 127
    log = re.search(r"the daemon's log is (.+)\.\n", done.stderr)
    assert log
    assert "pvrd" in Path(log[1]).read_text()
    Path(log[1]).unlink()
    assert run().returncode == 2


def test_an_end_from_outside_goes_on_to_the_command() -> None:
    script = 'trap "echo ended; exit 3" TERM; echo $PVRD_BUS; while :; do read line; done'
    with subprocess.Popen(
        [WITH_PVRD, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ended\n"
        assert process.wait(60) == 3
    assert not os.path.exists(address.removeprefix("unix:path="))
