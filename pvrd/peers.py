# SPDX-License-Identifier: Apache-2.0
"""Callers: their UID, when they leave the bus, and what each UID holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pvrd.bus import BUS, BusError, Connection, Signal, Subscription
from pvrd.config import Config
from pvrd.errors import NoSuchSession, QuotaExceeded


@dataclass
class Usage:
    """What one UID holds."""

    sessions: int = 0
    bytes: int = 0
    jobs: int = 0  # under way or waiting, pictures included
    fds: int = 0  # that pvrd has open for it


@dataclass
class _Peer:
    uid: int
    subscription: Subscription
    holds: int = 0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)  # that end when it leaves


class Peers:
    """Who is there. `on_gone` gets the unique name of a holder that left the bus."""

    def __init__(
        self, connection: Connection, config: Config, on_gone: Callable[[str], None]
    ) -> None:
        self._connection = connection
        self.config = config
        self._on_gone = on_gone
        self._peers: dict[str, _Peer] = {}
        self._usage: defaultdict[int, Usage] = defaultdict(Usage)

    async def uid(self, sender: str) -> int:
        """The caller's UID, asked of the bus.

        Raises:
            NoSuchSession: it left meanwhile.
        """
        if sender in self._peers:
            return self._peers[sender].uid
        try:
            return await self._connection.unix_user(sender)
        except BusError:
            raise NoSuchSession("the caller left the bus") from None

    async def hold(self, sender: str) -> int:
        """Watches the caller until release(); its UID.

        Raises:
            NoSuchSession: it left meanwhile.
        """
        if sender not in self._peers:
            left: list[Signal] = []

            def changed(signal: Signal) -> None:
                left.append(signal)
                self._owner_changed(signal)

            # Subscribe before asking, so that no departure falls between the two.
            subscription = await self._connection.subscribe(
                changed, sender=BUS, member="NameOwnerChanged", arg0=sender
            )
            try:
                uid = await self.uid(sender)
                if left:  # read in one turn with the answer, before this task had its own
                    raise NoSuchSession("the caller left the bus")
            except BaseException:
                subscription.cancel()
                raise
            if sender in self._peers:  # two calls at a time
                subscription.cancel()
            else:
                self._peers[sender] = _Peer(uid, subscription)
        peer = self._peers[sender]
        peer.holds += 1
        return peer.uid

    def release(self, sender: str) -> None:
        """One hold less; the last one ends the watch."""
        peer = self._peers.get(sender)
        if peer is None:
            return
        peer.holds -= 1
        if peer.holds <= 0:
            del self._peers[sender]
            peer.subscription.cancel()

    @contextlib.asynccontextmanager
    async def present(self, sender: str) -> AsyncIterator[None]:
        """The block is for a caller who waits for it: it is cancelled when that one leaves.

        Raises:
            NoSuchSession: it left already.
        """
        await self.hold(sender)
        task, tasks = asyncio.current_task(), self._peers[sender].tasks
        assert task is not None
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)
            self.release(sender)

    def _owner_changed(self, signal: Signal) -> None:
        name, _, new = signal.body
        if not new and name in self._peers:
            peer = self._peers.pop(name)
            peer.subscription.cancel()
            for task in list(peer.tasks):
                task.cancel()
            self._on_gone(name)

    # -- quotas

    def usage(self, uid: int) -> Usage:
        """What the UID holds."""
        return self._usage[uid]

    @contextlib.contextmanager
    def job(self, uid: int, fds: int = 0) -> Iterator[None]:
        """Counts a job of the UID, and what it has open, while the block runs."""
        held = self._usage[uid]
        held.jobs += 1
        held.fds += fds
        try:
            yield
        finally:
            held.jobs -= 1
            held.fds -= fds
            self._forget(uid)

    @contextlib.contextmanager
    def fds(self, uid: int, count: int) -> Iterator[None]:
        """Charges the UID with open file descriptors while the block runs.

        Raises:
            QuotaExceeded: it would have too many.
        """
        self.take(uid, fds=count)
        try:
            yield
        finally:
            self.give(uid, fds=count)

    def take(self, uid: int, sessions: int = 0, size: int = 0, fds: int = 0) -> None:
        """Charges the UID.

        Raises:
            QuotaExceeded: it would have too much; nothing was charged.
        """
        held = self._usage[uid]
        most = self.config.whole("limits.sessions")
        if sessions and held.sessions + sessions > most:
            raise QuotaExceeded(f"you have {held.sessions} sessions, limits.sessions is {most}")
        if size > self.free(uid):
            raise QuotaExceeded(
                f"this needs {size} bytes, you hold {held.bytes}, limits.bytes is "
                f"{self.config.whole('limits.bytes')}"
            )
        most = self.config.whole("limits.fds")
        if fds and held.fds + fds > most:
            raise QuotaExceeded(
                f"this needs {fds} file descriptors, pvrd has {held.fds} open for you, "
                f"limits.fds is {most}"
            )
        held.sessions += sessions
        held.bytes += size
        held.fds += fds

    def give(self, uid: int, sessions: int = 0, size: int = 0, fds: int = 0) -> None:
        """Takes a charge back."""
        held = self._usage[uid]
        held.sessions -= sessions
        held.bytes -= size
        held.fds -= fds
        self._forget(uid)

    def _forget(self, uid: int) -> None:
        if self._usage.get(uid) == Usage():
            del self._usage[uid]

    def free(self, uid: int) -> int:
        """Bytes that the UID may still take."""
        return max(0, self.config.whole("limits.bytes") - self._usage[uid].bytes)
