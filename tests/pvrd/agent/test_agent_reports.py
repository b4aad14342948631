# SPDX-License-Identifier: Apache-2.0
"""The daemon's end of reports, and the agent's view of GameMode."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pvrd.agent.daemon import Pvrd
from pvrd.agent.games import NAME, PATH, GameMode, named
from pvrd.bus import BusAddress, Call, Connection
from pvrd.bus_values import V
from pvrd.errors import InvalidArgument
from pvrd.reports import AGENTS_A_USER, Activity, Agent, Reports, check
from pvrd.sensors.compositor import Compositor

BAD: list[tuple[dict[str, Any], str]] = [
    ({"speed": 1.0}, "there is no option 'speed'"),
    ({"refresh_hz": float("nan")}, "is a number"),
    ({"refresh_hz": 0.0}, "lies in"),
    ({"refresh_hz": "60"}, "is a number"),
    ({"refresh_hz": True}, "is a number"),
    ({"latency_ms": 1e9}, "lies in"),
    ({"latency_ms": -1.0}, "lies in"),
    ({"missed_per_s": 1.0}, "needs refresh_hz"),
    ({"missed_per_s": 70.0, "refresh_hz": 60.0}, "is not above it"),
    ({"valid_s": 3600.0}, "lies in"),
    ({"reason": "a\nb"}, "control characters"),
    ({"games": ["a\x1b[2J"]}, "control characters"),
    ({"games": ["x" * 200]}, "characters"),
    ({"games": ["x"] * 17}, "at most 16"),
]


@pytest.mark.parametrize(("report", "says"), BAD)
def test_nonsense_is_refused(report: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        check(report)


def test_activity_ends_after_the_last_word_and_not_while_a_job_runs() -> None:
    async def play() -> list[bool]:
        heard: list[bool] = []
        running = True
        changed = asyncio.Event()

        def news() -> None:
            heard.append(activity.working)
            changed.set()

        activity = Activity(news, lambda: running, linger_s=0.01)
        for _ in range(3):
            activity.touch()
        assert heard == [True]
        await asyncio.sleep(0.05)
        assert heard == [True], "a job runs"
        running = False
        changed.clear()
        await asyncio.wait_for(changed.wait(), 10)
        activity.touch()
        activity.stop()
        return heard

    assert asyncio.run(play()) == [True, False, True]


@pytest.fixture(scope="module")
def daemon(start: Any) -> Any:
    return start()


def agent_fact(caller: Any) -> dict[str, str]:
    facts = caller.call("GetDiagnostics").body[0]
    (fact,) = [{k: v.value for k, v in f.items()} for f in facts if f["topic"].value == "agent"]
    return fact


@pytest.mark.bus
def test_reports_are_believed_bounded_and_forgotten(
    daemon: Any, caller: Any, callers: Callable[[], Any], until: Any
) -> None:
    fact = agent_fact(caller)
    assert (fact["status"], fact["code"]) == ("warning", "no_agent")
    assert "systemctl --user" in fact["remedy"]
    agent = callers()
    good = agent.options(refresh_hz=60.0, missed_per_s=3.0, latency_ms=17.5)
    assert agent.call("ReportCompositor", "a{sv}", [good]).body == [True]
    assert agent_fact(caller)["status"] == "ok"
    assert agent.fails("ReportCompositor", "a{sv}", [good])[0] == "Busy"
    bad = agent.options(refresh_hz=-1.0)
    assert agent.fails("ReportCompositor", "a{sv}", [bad])[0] == "InvalidArgument"
    more = [callers() for _ in range(AGENTS_A_USER)]
    for each in more[:-1]:
        each.call("ReportCompositor", "a{sv}", [{}])
    assert more[-1].fails("ReportCompositor", "a{sv}", [{}])[0] == "QuotaExceeded"
    for each in (agent, *more):
        each.connection.close()
    until(lambda: agent_fact(caller)["code"] == "no_agent")


class FakeGameMode:
    """com.feralinteractive.GameMode, with the games that a test gives it."""

    def __init__(self, connection: Connection) -> None:
        self.games: list[list[Any]] = []
        self.connection = connection
        connection.on_call = self._answer

    def _answer(self, call: Call) -> None:
        assert (call.path, call.member) == (PATH, "ListGames")
        self.connection.reply(call, "a(io)", [self.games])

    def tell(self, member: str, pid: int) -> None:
        self.connection.signal(PATH, NAME, member, "io", [pid, f"{PATH}/Games/{pid}"])


@pytest.mark.bus
def test_games_of_gamemode(bus: str) -> None:
    async def play() -> None:
        address = BusAddress.parse(bus)
        ours, theirs = await Connection.connect(address), await Connection.connect(address)
        changed = asyncio.Event()
        watched = GameMode(ours, changed.set)
        await watched.start()
        assert watched.games == ()

        async def after(act: Callable[[], Any]) -> tuple[str, ...]:
            changed.clear()
            act()
            await asyncio.wait_for(changed.wait(), 30)
            return watched.games

        fake = FakeGameMode(theirs)
        pid = os.getpid()
        fake.games = [[pid, f"{PATH}/Games/{pid}"]]
        changed.clear()
        await theirs.request_name(NAME)
        await asyncio.wait_for(changed.wait(), 30)
        assert watched.games == (named(pid),)
        fake.games = []
        assert await after(lambda: fake.tell("GameUnregistered", pid)) == ()
        fake.games = [[1 << 30, f"{PATH}/Games/1"]]
        assert await after(lambda: fake.tell("GameRegistered", 1 << 30)) == ("game (1073741824)",)
        assert await after(theirs.close) == ()
        ours.close()

    asyncio.run(play())


@pytest.mark.bus
def test_a_registered_game_holds_the_gpu(
    daemon: Any, bus: str, caller: Any, until: Any, tmp_path: Path
) -> None:
    """The whole way, in a session without Wayland: X11 has games, too."""
    without = ("WAYLAND_DISPLAY", "NOTIFY_SOCKET")
    env = {k: v for k, v in os.environ.items() if k not in without}
    env.update(
        DBUS_SESSION_BUS_ADDRESS=bus, PYTHONPATH=str(Path(__file__).parents[3]), DISPLAY=":9"
    )
    loop = caller.loop
    fake = FakeGameMode(loop.run_until_complete(Connection.connect(BusAddress.parse(bus))))
    fake.games = [[os.getpid(), f"{PATH}/Games/1"]]
    loop.run_until_complete(fake.connection.request_name(NAME))
    log = tmp_path / "log"
    with log.open("wb") as file:
        agent = subprocess.Popen(
            [sys.executable, "-m", "pvrd.agent", "--bus", bus, "--every=0.3"], env=env, stderr=file
        )
    reason = f"GameMode: {named(os.getpid())}"
    until(lambda: reason in caller.get("Decision")["reason"], "the hold")
    fake.games = []
    fake.tell("GameUnregistered", os.getpid())
    until(lambda: reason not in caller.get("Decision")["reason"], "its end")
    caller.state("gpu")
    session = caller.open_text()
    pipe = caller.generate(session, "slow", max_tokens=60000)
    until(lambda: "X11" in agent_fact(caller)["message"], "why nothing is measured")
    os.close(pipe)
    agent.terminate()
    assert agent.wait(30) == 0, log.read_text()
    fake.connection.close()


@pytest.mark.bus
def test_an_older_pvrd_is_left_alone(daemon: Any, bus: str) -> None:
    """One that knows neither Working nor Hold."""
    daemon.stop()  # the bus has one name

    async def play() -> None:
        address = BusAddress.parse(bus)
        ours, theirs = await Connection.connect(address), await Connection.connect(address)
        changed = asyncio.Event()
        pvrd = Pvrd(ours, changed.set)
        await pvrd.start()

        def answer(call: Call) -> None:
            kind = "UnknownProperty" if call.member == "Get" else "UnknownMethod"
            theirs.error(call, f"org.freedesktop.DBus.Error.{kind}", "it is old")

        theirs.on_call = answer
        changed.clear()
        await theirs.request_name("org.pvrd.Pvrd1")
        await asyncio.wait_for(changed.wait(), 30)
        assert (pvrd.old, pvrd.working) == (True, False)
        assert await pvrd.hold(("a game",)) is False
        theirs.signal(
            "/org/pvrd/Pvrd1", "org.freedesktop.DBus.Properties", "PropertiesChanged", "sa{sv}as",
            ["org.pvrd.Pvrd1.Manager", {"Working": V("s", "yes")}, []],
        )  # fmt: skip
        changed.clear()
        theirs.close()
        await asyncio.wait_for(changed.wait(), 30)
        assert (pvrd.owner, pvrd.working) == (None, False)
        ours.close()

    asyncio.run(play())


def test_an_agent_of_a_session_in_the_background_is_named_and_not_believed() -> None:
    nobody: Any = None
    reports = Reports(nobody, nobody, Compositor(lambda: 1001), lambda: None, lambda: 100.0)
    said = {**check({"games": ["GameMode: chess (7)"]})}
    reports._agents[":1.7"] = Agent(1000, 99.0, said)
    well, words = reports.words(working=True)
    assert not well
    assert words == "pvr-agent of UID 1000 is seen, but that user's session is not active"
    assert reports.games() == (), "nor does its game keep the GPU from others"
    reports._agents[":1.8"] = Agent(1001, 99.0, said)
    assert reports.words(working=True) == (True, "pvr-agent of UID 1001 is seen")
    assert reports.games() == ("GameMode: chess (7)",)
