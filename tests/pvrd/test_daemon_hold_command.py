# SPDX-License-Identifier: Apache-2.0
"""`pvrctl hold` with a daemon whose workers are fake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pvrd.ctl import hold

pytestmark = pytest.mark.bus
ROOT = Path(__file__).resolve().parents[2]
LONG = 60.0


@pytest.fixture(scope="module")
def daemon(start: Any) -> Any:
    return start()


@pytest.fixture
def pvrctl(daemon: Any, bus: str) -> Any:
    """Starts `pvrctl hold` with these arguments."""
    begun: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "pvrd.ctl.main", "--bus", bus, "hold", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=ROOT,
        )  # fmt: skip
        begun.append(process)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.wait(LONG)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def test_the_gpu_is_free_before_the_command_begins(pvrctl: Any, caller: Any) -> None:
    caller.state("gpu")
    gpu = next(d["pid"] for d in caller.get("Devices") if d["kind"] == "gpu")
    script = f"test -e /proc/{gpu} && echo there || echo free; echo $0 $1; read line; exit 7"
    process = pvrctl("--reason", "a film", "--", "sh", "-c", script, "--json", "-x")
    assert process.stdout.readline() == "free\n"
    assert process.stdout.readline() == "--json -x\n"
    assert caller.get("Reason") == "the GPU is held: a film"
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(LONG) == 7
    caller.state("gpu")


def test_without_a_reason_it_is_the_command_s_name(pvrctl: Any, caller: Any) -> None:
    caller.state("gpu")
    process = pvrctl("cat")
    caller.state("cpu")
    assert caller.get("Reason") == "the GPU is held: cat"
    process.stdin.close()
    assert process.wait(LONG) == 0
    caller.state("gpu")


def test_a_command_whose_name_cannot_be_shown(pvrctl: Any, caller: Any, tmp_path: Path) -> None:
    caller.state("gpu")
    command = os.path.join(os.fsencode(tmp_path), b"\xff\x07")
    os.symlink("/bin/cat", command)
    process = pvrctl("--", os.fsdecode(command))
    caller.state("cpu")
    assert caller.get("Reason") == "the GPU is held: pvrctl hold"
    process.stdin.close()
    assert process.wait(LONG) == 0
    caller.state("gpu")


def test_signals_go_to_the_command_and_its_end_comes_back(pvrctl: Any, caller: Any) -> None:
    script = 'trap "echo got INT" INT; trap "exit 9" USR1; echo ready; while :; do sleep 0.05; done'
    process = pvrctl("--", "sh", "-c", script)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "got INT\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(LONG) == 9
    process = pvrctl("--", "sh", "-c", "kill -KILL $$")
    assert process.wait(LONG) == 128 + signal.SIGKILL
    process = pvrctl("--", "sh", "-c", "grep SigBlk /proc/self/status")
    assert process.stdout.readline().split() == ["SigBlk:", "0" * 16]
    assert process.wait(LONG) == 0


def test_a_command_that_is_none(pvrctl: Any, caller: Any) -> None:
    process = pvrctl("--", "/no/such/program")
    assert process.wait(LONG) == 127
    assert "cannot be run" in process.stderr.read()
    process = pvrctl("--", "/etc/passwd")
    assert process.wait(LONG) == 126
    caller.state("gpu")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_a_command_until_a_signal(pvrctl: Any, caller: Any, number: int) -> None:
    caller.state("gpu")
    process = pvrctl("--reason", "measuring")
    assert "kept free" in process.stderr.readline()
    assert caller.get("Reason") == "the GPU is held: measuring"
    process.send_signal(number)
    assert process.wait(LONG) == 0
    caller.state("gpu")


@pytest.mark.parametrize("ours", [True, False])
def test_a_hold_that_we_end_is_no_end_of_the_daemon(
    ours: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever leaves the bus sees the pipe close before it ends."""
    reader, writer = os.pipe()
    over = threading.Event()
    if ours:
        over.set()
    os.close(writer)
    hold._gone(reader, over)
    os.close(reader)
    assert ("pvrd ended" in capsys.readouterr().err) is not ours


def test_the_end_of_the_daemon_is_said(start: Any, pvrctl: Any, caller: Any, bus: str) -> None:
    daemon = start()
    alone = pvrctl()
    assert "kept free" in alone.stderr.readline()
    beside = pvrctl("--", "sh", "-c", "echo ready; read line; exit 3")
    assert beside.stdout.readline() == "ready\n"
    daemon.stop()
    assert alone.wait(LONG) == 3
    assert "not held any more" in alone.stderr.read()
    assert "not held any more" in beside.stderr.readline()
    beside.stdin.write("\n")
    beside.stdin.flush()
    assert beside.wait(LONG) == 3
    assert not os.path.exists(f"/proc/{daemon.process.pid}")
