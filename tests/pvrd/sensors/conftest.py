# SPDX-License-Identifier: Apache-2.0
"""A system bus of the test's own, with python-dbusmock's logind, UPower and power profiles."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from pvrd import config
from pvrd.bus import PROPERTIES, BusAddress, Connection, Variant
from pvrd.bus_values import plain
from pvrd.sensors import Sensors, service
from tests.buses import started_bus
from tests.pvrd.mocks import LONG, PYTHON, SystemBus

MOCK = "org.freedesktop.DBus.Mock"


def settings(**changed: Any) -> config.Config:
    """The defaults, with keys such as sensors__fdinfo changed."""
    values = {key: rule.default for key, rule in config.KEYS.items()}
    return config.Config(values | {k.replace("__", "."): v for k, v in changed.items()})


class Scene:
    """Sensors on a system bus, and a connection to it that plays the other side."""

    def __init__(self, connection: Connection, sensors: Sensors, news: asyncio.Event) -> None:
        self.connection = connection
        self.sensors = sensors
        self._news = news

    async def until(self, true: Callable[[], Any]) -> None:
        """Waits until news of the sensors make it true."""
        async with asyncio.timeout(LONG):
            while not true():
                await self._news.wait()
                self._news.clear()

    async def there(self, name: str) -> None:
        """Waits for a service."""
        async with asyncio.timeout(LONG):
            while await self.connection.name_owner(name) is None:
                await asyncio.sleep(0.02)

    async def call(self, name: str, path: str, member: str, signature: str, *body: Any) -> Any:
        """Calls a method of the mock itself."""
        reply = await self.connection.call(name, path, MOCK, member, signature, list(body))
        reply.close()
        return plain(reply.body[0]) if reply.body else None

    async def set(self, name: str, path: str, interface: str, key: str, value: Variant) -> None:
        """Sets a property; the mock says that it changed."""
        reply = await self.connection.call(
            name, path, PROPERTIES, "Set", "ssv", [interface, key, value]
        )
        reply.close()

    def reading(self, name: str) -> Mapping[str, Any]:
        return next(row for row in self.sensors.describe() if row["name"] == name)

    def value(self, name: str) -> Any:
        return self.reading(name)["value"]


@contextlib.asynccontextmanager
async def scene(address: str) -> AsyncIterator[Scene]:
    connection = await Connection.connect(BusAddress.parse(address))
    news = asyncio.Event()
    sensors = Sensors(connection, settings(), news.set)
    try:
        yield Scene(connection, sensors, news)
    finally:
        await sensors.stop()
        connection.close()


@pytest.fixture(scope="session")
def mocks() -> None:
    """Says what to install, instead of waiting for what cannot come."""
    try:
        subprocess.run([PYTHON, "-c", "import dbusmock"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.fail("python3-dbusmock is missing; tools/install/packages check installs it")


@pytest.fixture
def system(mocks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[SystemBus]:
    with started_bus() as started, closing(SystemBus(started.address)) as bus:
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", started.address)
        yield bus


@pytest.fixture
def play(
    system: SystemBus, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Scene], Awaitable[None]]], None]:
    """Runs a coroutine function on a Scene of the private system bus."""
    monkeypatch.setattr(service, "_ANSWER_S", LONG)  # of a mock on a busy machine

    def run(act: Callable[[Scene], Awaitable[None]]) -> None:
        async def whole() -> None:
            async with scene(system.address) as stage:
                await act(stage)

        asyncio.run(whole())

    return run
