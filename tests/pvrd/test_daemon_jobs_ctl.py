# SPDX-License-Identifier: Apache-2.0
"""pvrctl jobs, top and trace against a daemon with fake workers."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.buses import ROOT
from tests.pvrd.conftest import TEXT

pytestmark = pytest.mark.bus


@pytest.fixture(scope="module")
def ctl(start: Any, bus: str) -> Any:
    """Runs pvrctl; its result."""
    start({"limits.queue": 32})

    def run(*arguments: str, term: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PVRD_BUS": bus, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
        env["TERM"] = term
        command = [sys.executable, "-m", "pvrd.ctl.main", *arguments]
        return subprocess.run(
            command, env=env, text=True, timeout=60, stderr=subprocess.PIPE, check=False,
            **{"stdout": subprocess.PIPE, **more},
        )  # fmt: skip

    return run


def test_jobs(ctl: Any, caller: Any, lines: Any, until: Any) -> None:
    caller.state("gpu")
    assert ctl("jobs", "--all").stdout == "No sessions and no jobs.\n"
    session = caller.open_text(priority=9, share=25)
    until(lambda: caller.get("Ready", session, TEXT))
    stream = lines(caller.generate(session, "slow", max_tokens=1500))
    while (stream.next() or {}).get("type") != "token":
        pass
    assert session.rpartition("/")[2] in ctl("jobs").stdout
    done = ctl("jobs", "--all")
    head, row = done.stdout.splitlines()
    assert head.split()[:3] == ["SESSION", "JOB", "KIND"]
    assert head.split()[-1] == "UID"
    assert session.rpartition("/")[2] == row.split()[0]
    assert all(word in row for word in ("text", "gpu", "25 %", "running", "tokens"))
    (found,) = json.loads(ctl("jobs", "--all", "--json").stdout)
    assert (found["priority"], found["session"]) == (9, session)
    caller.call("Close", path=session, interface=TEXT)
    stream.rest()


def test_top(ctl: Any, caller: Any) -> None:
    done = ctl("top", "-n", "2", "-d", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert {d["kind"] for d in first["devices"]} == {"gpu", "cpu"}
    assert {p["name"] for p in second["processes"]} == {"pvrd", "worker gpu", "worker cpu"}
    assert all(p["rss_bytes"] > 1 << 20 and p["threads"] >= 1 for p in second["processes"])
    plain = ctl("top", "--count", "1", "--delay", "0.1").stdout
    assert "\x1b" not in plain
    assert all(word in plain for word in ("DEVICE", "PROCESS", "worker gpu", "up "))
    for bad in (("-n", "0"), ("-d", "0")):
        assert ctl("top", *bad).returncode == 2


def test_top_on_a_terminal_clears_it_and_fits_it(ctl: Any) -> None:
    ours, theirs = pty.openpty()
    try:
        for term, size in (("xterm", (0, 0)), ("xterm", (3, 20)), ("dumb", (3, 20)), ("", (3, 20))):
            termios.tcsetwinsize(theirs, size)
            looks = ctl("top", "-n", "1", "-d", "0.1", stdout=theirs, term=term)
            assert looks.returncode == 0
            shown = os.read(ours, 65536).decode()
            assert shown.startswith("\x1b[H\x1b[J") == (term == "xterm")
            lines = shown.removeprefix("\x1b[H\x1b[J").split("\r\n")
            small = term == "xterm" and size == (3, 20)
            assert (len(lines) <= 3 and max(map(len, lines)) <= 20) == small, shown
            assert lines[0].startswith("pvrd ")
    finally:
        os.close(ours)
        os.close(theirs)


def test_trace(ctl: Any, tmp_path: Path) -> None:
    out = tmp_path / "a trace.json"
    done = ctl("trace", str(out), "--seconds", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "perfetto" in done.stdout
    events = json.loads(out.read_text())["traceEvents"]
    assert any(event["ph"] == "X" for event in events)
    assert json.loads(ctl("trace", "-", "--seconds", "0.1").stdout)["traceEvents"]
    told = json.loads(ctl("trace", str(out), "--seconds", "0.1", "--json").stdout)
    assert told["bytes"] == out.stat().st_size
    assert ctl("trace", str(out), "--seconds", "601").returncode == 2
    missing = ctl("trace", str(tmp_path / "no" / "out.json"), "--seconds", "0.01")
    assert missing.returncode == 1
    assert "Traceback" not in missing.stderr
    assert os.listdir(tmp_path) == ["a trace.json"]
