# SPDX-License-Identifier: Apache-2.0
"""Callers who leave the bus while they are asked about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pvrd.bus import Signal
from pvrd.errors import NoSuchSession
from pvrd.peers import Peers

CALLER = ":1.7"


class Bus:
    """A bus whose answers come when they are let; it has callbacks of subscriptions."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Signal], None]] = []
        self.uid: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def subscribe(self, callback: Callable[[Signal], None], **_: str) -> Any:
        self.callbacks.append(callback)
        return SimpleNamespace(cancel=lambda: self.callbacks.remove(callback))

    async def unix_user(self, _name: str) -> int:
        return await asyncio.shield(self.uid)

    def leaves(self) -> None:
        for callback in list(self.callbacks):
            callback(Signal("", "", "", "NameOwnerChanged", [CALLER, CALLER, ""]))


def peers(bus: Bus, gone: list[str]) -> Peers:
    return Peers(cast("Any", bus), cast("Any", None), gone.append)


def test_a_caller_who_leaves_in_one_breath_with_the_answer() -> None:
    """The connection reads both before who waits for the answer goes on."""

    async def work() -> None:
        bus, gone = Bus(), list[str]()
        here = peers(bus, gone)
        holds = [asyncio.ensure_future(here.hold(CALLER)) for _ in range(2)]
        while len(bus.callbacks) < 2:
            await asyncio.sleep(0)
        bus.uid.set_result(1000)
        bus.leaves()
        for error in await asyncio.gather(*holds, return_exceptions=True):
            assert isinstance(error, NoSuchSession)
        assert bus.callbacks == []

    asyncio.run(work())


def test_a_caller_who_stays_is_watched_once_and_then_leaves() -> None:
    async def work() -> None:
        bus, gone = Bus(), list[str]()
        here = peers(bus, gone)
        bus.uid.set_result(1000)
        assert await asyncio.gather(here.hold(CALLER), here.hold(CALLER)) == [1000, 1000]
        assert len(bus.callbacks) == 1
        asked = asyncio.get_running_loop().create_future()

        async def waits() -> None:
            async with here.present(CALLER):
                await asked

        task = asyncio.ensure_future(waits())
        await asyncio.sleep(0)
        bus.leaves()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (gone, bus.callbacks) == ([CALLER], [])

    asyncio.run(work())
