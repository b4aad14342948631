# SPDX-License-Identifier: Apache-2.0
"""The system bus's services through the real sensors: logind, UPower, power profiles."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pvrd.bus import BusAddress, BusError, Connection, Subscription
from pvrd.bus_values import V
from pvrd.sensors import battery, board, logind, service
from pvrd.sensors.service import Service

pytestmark = pytest.mark.bus

MANAGER = ("org.freedesktop.login1", "/org/freedesktop/login1")
SEAT = "/org/freedesktop/login1/seat/seat0"
PROFILES = ("net.hadess.PowerProfiles", "/net/hadess/PowerProfiles")


async def session(scene: Any, number: str, uid: int, kind: str) -> None:
    """A user's session in the foreground of seat0."""
    path = await scene.call(*MANAGER, "AddSession", "ssusb", number, "seat0", uid, "u", True)
    await scene.set(MANAGER[0], path, logind.SESSION, "Type", V("s", kind))
    await scene.set(
        MANAGER[0], SEAT, logind.SEAT, "ActiveSession", V("(so)", [number, path])
    )  # fmt: skip


def test_the_session_in_the_foreground(system: Any, play: Any) -> None:
    system.mock("logind")

    async def act(scene: Any) -> None:
        await scene.there(logind.LOGIND)
        await session(scene, "c1", 1000, "wayland")
        await scene.sensors.start()
        assert scene.value("session_active") is True
        assert scene.reading("session_active")["source"] == "logind, session c1 (wayland)"
        assert scene.sensors.logind.active_uid == 1000
        await session(scene, "c2", 1001, "tty")
        await scene.until(lambda: scene.value("session_active") is False)
        assert scene.sensors.logind.active_uid == 1001

    play(act)


def test_nobody_at_the_seat(system: Any, play: Any) -> None:
    system.mock("logind")

    async def act(scene: Any) -> None:
        await scene.there(logind.LOGIND)
        await session(scene, "c1", 1000, "x11")
        await scene.sensors.start()
        assert scene.value("idle") is False
        await scene.set(MANAGER[0], SEAT, logind.SEAT, "IdleHint", V("b", True))
        await scene.until(lambda: scene.value("idle") is True)
        assert scene.reading("idle")["source"] == "logind, seat0"

    play(act)


def test_suspend_waits_for_the_lock(system: Any, play: Any) -> None:
    system.mock("logind")

    async def act(scene: Any) -> None:
        await scene.there(logind.LOGIND)
        heard: list[bool] = []
        scene.sensors.logind.on_sleep = heard.append
        await scene.sensors.start()
        assert await scene.sensors.logind.inhibit()
        assert await scene.sensors.logind.inhibit()  # once is enough

        async def locks() -> int:
            reply = await scene.connection.call(*MANAGER, logind.MANAGER, "ListInhibitors")
            what = [row[:2] + row[3:4] for row in reply.body[0]]
            assert all(row == ["sleep", "pvrd", "delay"] for row in what)
            return len(what)

        assert await locks() == 1
        for going in (True, False):
            await scene.call(
                *MANAGER, "EmitSignal", "sssav", logind.MANAGER, "PrepareForSleep", "b",
                [V("b", going)],
            )  # fmt: skip
            await scene.until(lambda going=going: scene.sensors.logind.sleeping is going)
            assert scene.sensors.snapshot(1.0).sleeping is going
        assert heard == [True, False]
        scene.sensors.logind.release()
        scene.sensors.logind.release()
        async with asyncio.timeout(30):
            while await locks():
                await asyncio.sleep(0.01)

    play(act)


def test_a_stranger_does_not_send_us_to_sleep(system: Any, play: Any) -> None:
    """Whoever is on the bus may send us a signal, past all rules; only logind's own counts."""
    system.mock("logind")

    async def act(scene: Any) -> None:
        await scene.there(logind.LOGIND)
        await scene.sensors.start()
        stranger = await Connection.connect(BusAddress.parse(system.address))
        heard: list[Any] = []
        await scene.connection.subscribe(heard.append, member="PrepareForSleep")
        stranger.signal(
            MANAGER[1], logind.MANAGER, "PrepareForSleep", "b", [True],
            destination=scene.connection.unique_name,
        )  # fmt: skip
        async with asyncio.timeout(30):
            while not heard:
                await asyncio.sleep(0.01)
        assert scene.sensors.logind.sleeping is False
        stranger.close()

    play(act)


def test_upower_tells_of_battery_and_lid(system: Any, play: Any) -> None:
    system.mock("upower", '{"OnBattery": true}')
    mock = (battery.UPOWER, battery.UPOWER_PATH)

    async def act(scene: Any) -> None:
        async def display(percent: float) -> None:
            await scene.call(
                *mock, "SetupDisplayDevice", "uuddddxxbsu", 2, 2, percent, 1.0, 2.0, 1.0, 100, 0,
                True, "", 1,
            )  # fmt: skip

        await scene.there(battery.UPOWER)
        await display(80.0)
        await scene.sensors.start()
        snapshot = scene.sensors.snapshot(1.0)
        assert (snapshot.battery, snapshot.on_battery) == (80.0, True)
        assert snapshot.sources["battery"] == snapshot.sources["on_battery"] == "UPower"
        assert scene.value("lid_closed") is False
        await display(19.0)
        await scene.until(lambda: scene.value("battery") == 19.0)
        await scene.set(*mock, battery.UPOWER, "OnBattery", V("b", False))
        await scene.until(lambda: scene.value("on_battery") is False)
        await scene.set(*mock, battery.UPOWER, "LidIsClosed", V("b", True))
        await scene.until(lambda: scene.value("lid_closed") is True)

    play(act)


def test_the_power_saver(system: Any, play: Any) -> None:
    system.mock("power_profiles_daemon", '{"ActiveProfile": "balanced"}')

    async def act(scene: Any) -> None:
        await scene.there(PROFILES[0])
        await scene.sensors.start()
        assert scene.value("power_saver") is False
        await scene.set(*PROFILES, PROFILES[0], "ActiveProfile", V("s", "power-saver"))
        await scene.until(lambda: scene.value("power_saver") is True)

    play(act)


def test_a_service_comes_goes_and_comes_back(system: Any, play: Any) -> None:
    async def act(scene: Any) -> None:
        await scene.sensors.start()
        why = "org.freedesktop.login1 is not on the system bus"
        row = scene.reading("idle")
        assert (row["value"], row["source"]) == ("unknown", why)
        assert not await scene.sensors.logind.inhibit()
        for _ in range(2):
            system.mock("logind", '{"IdleHint": true}')
            await scene.until(lambda: scene.value("idle") is True)
            assert scene.reading("idle")["source"] == "logind, all sessions"
            assert scene.reading("session_active")["source"] == "logind has no seat0"
            system.end("logind")
            await scene.until(lambda: scene.value("idle") == "unknown")
            assert scene.reading("idle")["source"] == why

    play(act)


def test_only_the_foreground_is_believed(system: Any, play: Any) -> None:
    system.mock("logind")

    async def act(scene: Any) -> None:
        await scene.there(logind.LOGIND)
        await session(scene, "c1", 4711, "wayland")
        await scene.sensors.start()
        store = scene.sensors.compositor
        assert not store.report(":1.5", os.geteuid(), {"missed_per_s": 60.0}, 1.0)
        assert scene.sensors.snapshot(1.0).missed_per_s is None
        assert store.report(":1.6", 4711, {"missed_per_s": 2.0}, 1.0)
        assert scene.sensors.snapshot(1.0).missed_per_s == 2.0

    play(act)


@pytest.mark.parametrize("refused", [False, True])
def test_what_one_that_has_gone_said_last_counts_no_more(refused: bool) -> None:
    """Its answer and the word that it left may come in one piece; the word is heard first."""

    class Answer:
        body = ({"IdleHint": V("b", True)},)

        def close(self) -> None:
            pass

    class Late:
        async def call(self, *_: Any, **__: Any) -> Answer:
            known._appeared(None)
            if refused:
                raise BusError("org.freedesktop.DBus.Error.UnknownMethod", "there is no GetAll")
            return Answer()

    changes: list[int] = []
    known = Service(cast(Connection, Late()), MANAGER[0], lambda: changes.append(1))
    key = MANAGER[1], MANAGER[0]
    known._watched[key] = cast(Subscription, None)
    known._appeared(":1.5")
    asyncio.run(known.read(*key))
    assert known.absent == "org.freedesktop.login1 is not on the system bus"
    assert known.get(*key) == {}
    assert not changes


class Silent:
    """A connection on which nothing answers while `silent`; what was asked since is counted."""

    def __init__(self) -> None:
        self.silent = True
        self.asked: list[str] = []
        self.owner: Any = None

    def _answered(self, member: str) -> None:
        self.asked.append(member)
        if self.silent:
            raise BusError("org.freedesktop.DBus.Error.NoReply", f"it did not answer {member}")

    async def subscribe(self, callback: Any, **match: str) -> Any:
        if match.get("member") == "NameOwnerChanged":
            self.owner = callback
        else:
            self._answered("AddMatch")
        return SimpleNamespace(cancel=lambda: None)

    async def name_owner(self, name: str) -> str:
        return ":1.5"

    async def call(
        self, name: str, path: str, interface: str, member: str, *_: Any, **__: Any
    ) -> Any:
        self._answered(member)
        answers: dict[str, Any] = {"GetAll": {"IdleHint": V("b", True)}, "GetSeat": SEAT}
        return SimpleNamespace(body=[answers[member]], close=lambda: None)


def test_a_service_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It owns its name and is still starting, or the machine is busy: no signal says that it is
    over. A refusal is an answer.
    """
    monkeypatch.setattr(service, "_AGAIN_S", 0.001)

    async def main() -> None:
        bus = Silent()
        news = asyncio.Event()
        watched = logind.Logind(news.set)
        watched._service = known = Service(cast(Connection, bus), logind.LOGIND, watched._changed)
        await known.start()

        async def until(true: Any) -> None:
            async with asyncio.timeout(30):
                while not true():
                    await asyncio.sleep(0.001)

        await known.watch(logind.MANAGER_PATH, logind.MANAGER)
        await watched._follow()
        await until(lambda: bus.asked.count("AddMatch") > 2 and bus.asked.count("GetSeat") > 2)
        assert watched.readings()[0].value is None
        bus.silent = False
        await until(lambda: watched.readings()[0].source == "logind, seat0")
        assert watched.readings()[0].value is True
        bus.silent = True
        await known.read(logind.MANAGER_PATH, logind.MANAGER)
        assert watched.readings()[0].value is None
        bus.silent = False
        await until(lambda: watched.readings()[0].value is True)
        assert not known._timers
        known.again("x", BusError("org.freedesktop.DBus.Error.AccessDenied", "no"), known.start)
        assert not known._timers
        watched.stop()

    asyncio.run(main())


def test_a_bus_that_does_not_answer_is_joined_again(
    system: Any, monkeypatch: pytest.MonkeyPatch, play: Any
) -> None:
    """The first question to it fails; the services are found all the same."""
    monkeypatch.setattr(board, "_BACKOFF_S", 0.01)
    system.mock("logind", '{"IdleHint": true}')
    real, asked = Connection.name_owner, []

    async def name_owner(self: Connection, name: str) -> str | None:
        asked.append(name)
        if len(asked) < 3:
            raise BusError("org.freedesktop.DBus.Error.NoReply", "the bus did not answer")
        return await real(self, name)

    async def act(scene: Any) -> None:
        await scene.there(logind.LOGIND)
        monkeypatch.setattr(Connection, "name_owner", name_owner)
        await scene.sensors.start()
        assert scene.reading("idle")["source"] == "the bus did not answer"
        await scene.until(lambda: scene.value("idle") is True)

    play(act)
