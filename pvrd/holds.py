# SPDX-License-Identifier: Apache-2.0
"""Holds: who keeps the GPU free for something else, a game for example, and how long.

A hold lives as long as the pipe that its caller got is open anywhere, and as long as the caller is
on the bus. The caller's end is the reading one: it can end the hold and do nothing else with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pvrd.errors import InvalidArgument, OutOfMemory, QuotaExceeded
from pvrd.options import Option

REASON_CHARS = 128
HOLDS_A_USER = 16
OPTIONS: Mapping[str, Option] = {"interactive": Option("bool", False)}


@dataclass
class Hold:
    """One hold."""

    reason: str
    uid: int
    owner: str  # the unique name that asked for it
    fd: int  # our end


class Holds:
    """All holds. `on_change` is called when one comes or goes; `on_end` with its owner's name."""

    def __init__(
        self, on_change: Callable[[], None] = lambda: None,
        on_end: Callable[[str], None] = lambda owner: None,
    ) -> None:  # fmt: skip
        self.on_change = on_change
        self.on_end = on_end
        self._holds: list[Hold] = []

    def reasons(self) -> tuple[str, ...]:
        """Why the GPU is to be free, each reason once, in the order of coming."""
        return tuple(dict.fromkeys(hold.reason for hold in self._holds))

    def check(self, reason: str, uid: int) -> None:
        """Raises InvalidArgument for a reason that says nothing, QuotaExceeded for one hold too
        many of this user.
        """
        if not reason.strip() or not reason.isprintable() or len(reason) > REASON_CHARS:
            text = f"a hold has a reason of 1 to {REASON_CHARS} characters, without control ones"
            raise InvalidArgument(text)
        held = sum(1 for hold in self._holds if hold.uid == uid)
        if held >= HOLDS_A_USER:
            raise QuotaExceeded(f"you have {held} holds already, and {HOLDS_A_USER} at most")

    def add(self, reason: str, uid: int, owner: str) -> int:
        """A new hold; the caller's end of its pipe, which is the receiver's to close.

        Raises:
            as check(); OutOfMemory: the system gives no pipe.
        """
        self.check(reason, uid)
        try:
            theirs, ours = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            raise OutOfMemory(f"there is no pipe for a hold: {e.strerror}") from None
        hold = Hold(reason, uid, owner, ours)
        self._holds.append(hold)
        # Nothing can be read from this end: what wakes it is that the other end is closed.
        asyncio.get_running_loop().add_reader(ours, self._end, hold)
        self.on_change()
        return theirs

    def gone(self, owner: str) -> None:
        """The caller left the bus: its holds end."""
        for hold in [h for h in self._holds if h.owner == owner]:
            self._end(hold)

    def close(self) -> None:
        """Ends all of them; nobody is told."""
        for hold in self._holds:
            self._close(hold)
        self._holds.clear()

    def _end(self, hold: Hold) -> None:
        self._holds.remove(hold)
        self._close(hold)
        self.on_end(hold.owner)
        self.on_change()

    @staticmethod
    def _close(hold: Hold) -> None:
        asyncio.get_running_loop().remove_reader(hold.fd)
        os.close(hold.fd)
