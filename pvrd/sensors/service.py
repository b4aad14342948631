# SPDX-License-Identifier: Apache-2.0
"""Another service's properties on the system bus, kept as they change, while it is there.

Nothing is started on its behalf: a service that nobody runs is absent, and looked at again when
its name appears. One that is there and does not answer (it is starting, or the machine is busy) is
asked again. A signal is a hint that counts only from the owner of the name; the values come
from GetAll, whose answer nobody else can give.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

from pvrd.bus import BUS, PROPERTIES, BusError, Connection, Signal, Subscription
from pvrd.bus_values import plain

_ANSWER_S = 5.0
_AGAIN_S, _AGAIN_MAX_S = 1.0, 30.0  # until one that did not answer is asked again
_NO_ANSWER = f"{BUS}.Error.NoReply"


class Service:
    """One well-known name. `watch` objects of it, then `start`."""

    def __init__(self, connection: Connection, name: str, on_change: Callable[[], None]) -> None:
        self.connection = connection
        self.name = name
        self._on_change = on_change
        self._owner: str | None = None
        self._values: dict[tuple[str, str], dict[str, Any]] = {}
        self._watched: dict[tuple[str, str], Subscription] = {}
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._again: dict[tuple[str, str], bool] = {}  # being read -> read once more after that
        self._tries: dict[Hashable, int] = {}  # what was asked in vain -> how often
        self._timers: dict[Hashable, asyncio.TimerHandle] = {}
        self.absent = "it was not asked yet"  # why there is nothing; "" when there is

    @property
    def present(self) -> bool:
        """Does it run and answer?"""
        return self._owner is not None

    def get(self, path: str, interface: str) -> dict[str, Any]:
        """The properties as they were told last; {} without."""
        return self._values.get((path, interface), {})

    async def start(self) -> None:
        """Looks whether it is there, and goes on looking.

        Raises:
            BusError: the bus refuses to tell.
        """
        self._subscriptions.append(
            await self.connection.subscribe(
                self._owner_changed, sender=BUS, member="NameOwnerChanged", arg0=self.name
            )
        )
        self._appeared(await self.connection.name_owner(self.name))

    async def watch(self, path: str, interface: str) -> None:
        """Keeps the properties of an object from now on; returns when they were read once."""
        key = (path, interface)
        if key in self._watched:
            return
        try:
            self._watched[key] = await self.connection.subscribe(
                self._changed, sender=self.name, path=path, interface=PROPERTIES,
                member="PropertiesChanged", arg0=interface,
            )  # fmt: skip
        except BusError as e:
            self.again(key, e, lambda: self.watch(path, interface))
            return
        await self.read(path, interface)

    def unwatch(self, path: str, interface: str) -> None:
        """Forgets an object."""
        subscription = self._watched.pop((path, interface), None)
        self._values.pop((path, interface), None)
        if subscription is not None:
            subscription.cancel()

    async def on_signal(self, callback: Callable[[Signal], None], **match: str) -> None:
        """Signals of this service alone go to `callback`.

        Raises:
            BusError: the bus refuses the rule.
        """

        def take(signal: Signal) -> None:
            if signal.sender == self._owner:
                callback(signal)

        self._subscriptions.append(await self.connection.subscribe(take, sender=self.name, **match))

    async def call(
        self, path: str, interface: str, member: str, signature: str = "", body: Any = ()
    ) -> Any:
        """Calls a method; the Reply, whose fds the caller takes or closes.

        Raises:
            BusError: it is not there, refuses, or does not answer.
        """
        return await self.connection.call(
            self.name, path, interface, member, signature, body, timeout=_ANSWER_S
        )

    async def read(self, path: str, interface: str) -> None:
        """Reads the properties now; {} when there are none."""
        key = (path, interface)
        if key in self._again:
            self._again[key] = True
            return
        try:
            while True:
                self._again[key] = False
                await self._get_all(key)
                if not self._again[key]:
                    return
        finally:
            del self._again[key]

    async def _get_all(self, key: tuple[str, str]) -> None:
        values: dict[str, Any] = {}
        if (owner := self._owner) is not None:
            failure = ""
            try:
                reply = await self.call(key[0], PROPERTIES, "GetAll", "s", [key[1]])
                reply.close()
                values = plain(reply.body[0])
                self._tries.pop(key, None)
            except BusError as e:
                if self._owner == owner:
                    self.again(key, e, lambda: self.read(*key))
                failure = f"{self.name} does not answer: {e.message}"
            if self._owner != owner:
                return  # said of one that has gone; _owner_changed has it read again
            self.absent = failure or self.absent
        if key in self._watched and self._values.get(key, {}) != values:
            self._values[key] = values
            self._on_change()

    def again(
        self, key: Hashable, error: BusError, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Does `work` later where the error is that nothing answered: soon, then ever more rarely.
        What is refused stays so.
        """
        if error.name != _NO_ANSWER or key in self._timers:
            return
        tries = self._tries.get(key, 0)
        self._tries[key] = tries + 1
        pause = min(_AGAIN_S * 2 ** min(tries, 16), _AGAIN_MAX_S)

        def fire() -> None:
            del self._timers[key]
            self._start(work())

        self._timers[key] = asyncio.get_running_loop().call_later(pause, fire)

    def _ask_anew(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._tries.clear()

    def stop(self) -> None:
        """Forgets everything; the connection stays."""
        self._ask_anew()
        for subscription in [*self._subscriptions, *self._watched.values()]:
            subscription.cancel()
        self._subscriptions.clear()
        self._watched.clear()
        self._values.clear()
        self._owner = None
        for task in self._tasks:
            task.cancel()

    # -- what the bus says

    def _appeared(self, owner: str | None) -> None:
        self._owner = owner
        self.absent = "" if owner else f"{self.name} is not on the system bus"

    def _owner_changed(self, signal: Signal) -> None:
        if signal.sender != BUS:
            return
        self._ask_anew()
        self._appeared(str(signal.body[2]) or None)
        for key in list(self._watched):
            self._start(self.read(*key))
        self._on_change()

    def _changed(self, signal: Signal) -> None:
        if signal.sender == self._owner:
            self._start(self.read(signal.path, str(signal.body[0])))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
