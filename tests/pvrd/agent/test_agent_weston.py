# SPDX-License-Identifier: Apache-2.0
"""pvr-agent between a real compositor (Weston without a screen) and a real daemon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.bus
LONG = 30.0
# Its whole refresh for drawing: otherwise Weston without a screen shows 40 frames/s of its 60.
WESTON_INI = "[core]\nrepaint-window=16\nidle-time=0\n[shell]\nanimation=none\nlocking=false\n"


class Weston:
    """Weston on a socket of its own; it may be ended and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "weston.ini").write_text(WESTON_INI)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                ["weston", "--backend=headless-backend.so", "--socket=wayland-t",
                 f"--config={self.folder}/weston.ini"],
                env={**os.environ, "XDG_RUNTIME_DIR": str(self.folder)}, stdout=log, stderr=log,
            )  # fmt: skip
        end = time.monotonic() + LONG
        while not (self.folder / "wayland-t").exists():
            assert time.monotonic() < end, (self.folder / "log").read_text()
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            self.process.wait(LONG)
            self.process = None


@pytest.fixture
def weston(tmp_path: Path) -> Iterator[Weston]:
    tmp_path.chmod(0o700)
    compositor = Weston(tmp_path)
    compositor.start()
    yield compositor
    compositor.end()


@pytest.fixture
def agent(
    weston: Weston, bus: str, tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts agents; each ends without an error."""
    started: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "agent.log"

    def start() -> subprocess.Popen[bytes]:
        env = {
            **os.environ, "XDG_RUNTIME_DIR": str(weston.folder), "WAYLAND_DISPLAY": "wayland-t",
            "DBUS_SESSION_BUS_ADDRESS": bus, "PYTHONPATH": str(Path(__file__).parents[3]),
            "PYTHONWARNINGS": "error",
        }  # fmt: skip
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "pvrd.agent", "--bus", bus, "--every=0.3", "--window"],
                env=env, stderr=file,
            )  # fmt: skip
        started.append(process)
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        assert process.wait(LONG) == 0, log.read_text()
    assert "fault of its own" not in log.read_text()
    assert "Warning" not in log.read_text()


class Seen:
    """What the daemon says about its agent."""

    def __init__(self, caller: Any, until: Any) -> None:
        self._caller, self._until = caller, until
        self.last = ""

    def words(self) -> str:
        facts = self._caller.call("GetDiagnostics").body[0]
        (fact,) = [f for f in facts if f["topic"].value == "agent"]
        self.last = str(fact["message"].value)
        return self.last

    def missed(self) -> float | None:
        """Of the daemon's snapshot: refreshes missed in a second, None when that is unknown."""
        rows = self._caller.call("GetStatistics").body[0]["sensors"].value
        known = {row["name"].value: row["value"].value for row in rows}
        self.last = str({k: v for k, v in known.items() if k in ("missed_per_s", "refresh_hz")})
        if known["missed_per_s"] == "unknown":
            return None
        assert known["refresh_hz"] == pytest.approx(60.0, abs=0.01)
        return float(known["missed_per_s"])

    def comes(self, condition: Callable[[], bool]) -> None:
        self._until(condition, f"what was waited for; the last was {self.last!r}")


@pytest.fixture
def seen(caller: Any, until: Any) -> Seen:
    return Seen(caller, until)


def work(caller: Any) -> tuple[str, int]:
    """A job of many minutes; the session and its pipe."""
    caller.state("gpu")
    session = caller.open_text()
    return session, caller.generate(session, "slow", max_tokens=60000)


def sleeps(process: subprocess.Popen[bytes]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("voluntary_ctxt_switches:")[1].split()[0])


def test_misses_show_while_pvrd_works(
    start: Any, agent: Any, weston: Weston, caller: Any, seen: Seen, until: Any
) -> None:
    start()
    assert seen.words().startswith("no pvr-agent was seen")
    process = agent()
    seen.comes(lambda: "is seen: it measures while pvrd has work" in seen.words())

    def quiet() -> bool:
        before = sleeps(process)
        time.sleep(1.0)
        return sleeps(process) == before

    until(quiet, "a second in which an agent with nothing to do is not woken")
    _, pipe = work(caller)
    until(lambda: caller.get("Working") is True, "Working")
    seen.comes(lambda: seen.missed() is not None)
    weston.signal(signal.SIGSTOP)
    seen.comes(lambda: "answers nothing at present" in seen.words())
    assert seen.missed() == pytest.approx(60.0, abs=0.01)
    weston.signal(signal.SIGCONT)
    seen.comes(lambda: "ms to the screen" in seen.words())

    process.send_signal(signal.SIGSTOP)
    seen.comes(lambda: seen.missed() is None)
    assert "silent for" in seen.words()
    process.send_signal(signal.SIGCONT)
    seen.comes(lambda: seen.missed() is not None)
    process.terminate()
    assert process.wait(LONG) == 0
    seen.comes(lambda: seen.missed() is None)
    seen.comes(lambda: seen.words().startswith("no pvr-agent was seen"))
    os.close(pipe)


def test_it_outlives_pvrd_and_the_compositor(
    start: Any, agent: Any, weston: Weston, caller: Any, seen: Seen
) -> None:
    daemon = start()
    agent()
    _, pipe = work(caller)
    seen.comes(lambda: seen.missed() is not None)
    weston.end()
    seen.comes(
        lambda: re.search("compositor (ended|is gone)|no compositor", seen.words()) is not None
    )
    weston.start()
    seen.comes(lambda: seen.missed() is not None)
    os.close(pipe)
    daemon.stop()
    start()
    seen.comes(lambda: "is seen" in seen.words())
    _, pipe = work(caller)
    seen.comes(lambda: seen.missed() is not None)
    os.close(pipe)
