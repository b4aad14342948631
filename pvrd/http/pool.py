# SPDX-License-Identifier: Apache-2.0
"""Sessions of pvrd that stay open between requests: a talk that goes on finds what was computed of
it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from pvrd.client_async import AsyncClient, AsyncTextSession
from pvrd.errors import Busy, NoSuchSession

Turns = Sequence[Mapping[str, str]]


class _Seat:
    """A session, and the talk that it had last."""

    def __init__(self, model: str, session: AsyncTextSession) -> None:
        self.model = model
        self.session = session
        self.turns: list[Mapping[str, str]] = []
        self.used = 0  # the pool's count when it was used last

    def shared(self, turns: Turns) -> int:
        """How many turns at the beginning are those of its last talk."""
        most = min(len(self.turns), len(turns))
        return next((n for n in range(most) if self.turns[n] != turns[n]), most)


class Pool:
    """At most `most` sessions; the one unused for longest makes room for another model's."""

    def __init__(self, client: AsyncClient, most: int, context: int) -> None:
        """context: tokens of prompt and answer in each session."""
        self._client = client
        self._most = most
        self._context = context
        self._idle: list[_Seat] = []
        self._taken = 0
        self._count = 0

    @contextlib.asynccontextmanager
    async def session(self, model: str, turns: Turns = ()) -> AsyncIterator[AsyncTextSession]:
        """A session for one job. With an error, or when broken off, it is closed.

        Raises:
            Busy: all are taken.
            PvrdError: pvrd opens none.
        """
        seat = await self._take(model, turns)
        self._taken += 1
        kept = False
        try:
            yield seat.session
            seat.turns = list(turns)
            kept = True
        finally:
            self._taken -= 1
            if kept:
                self._count += 1
                seat.used = self._count
                self._idle.append(seat)
            else:
                await seat.session.close()

    async def _take(self, model: str, turns: Turns) -> _Seat:
        fitting = [s for s in self._idle if s.model == model]
        # Where a talk goes on, the session that had it; else the one that is least likely missed.
        best = max(fitting, key=lambda s: (s.shared(turns), -s.used), default=None)
        going_on = best is not None and best.shared(turns) > 0
        full = self._taken + len(self._idle) >= self._most
        if best is not None and (going_on or full):
            self._idle.remove(best)
            return best
        if self._taken >= self._most:
            raise Busy(f"all {self._most} places are taken")
        if full:
            oldest = min(self._idle, key=lambda s: s.used)
            self._idle.remove(oldest)
            await oldest.session.close()
        options = {"context": self._context, "model": model or None}
        self._taken += 1  # its place, while it is being opened
        try:
            return _Seat(model, await self._client.open_text(options))
        finally:
            self._taken -= 1

    async def close(self) -> None:
        """Closes what is idle; what is at work ends with the client."""
        while self._idle:
            with contextlib.suppress(NoSuchSession):
                await self._idle.pop().session.close()
