# SPDX-License-Identifier: Apache-2.0
"""A connection that has to say in time what it wants: others may open them, too, since the port is
every user's, and each one held costs a descriptor of a thousand.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # for a request's head, from the connection or from the answer before it
BODY_S = 30.0  # for its body, from its head; who does not send it is told, if it listens
LEAVE_S = 5.0  # for hearing that
MOST = 128  # connections at a time
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: 0\r\n\r\n"
)


class BoundedConnection(H11Protocol):
    """uvicorn's connection with bounds: HEAD_S, BODY_S and MOST. Where there are MOST, the one that
    has waited longest without a request is closed for a new one.
    """

    transport: asyncio.Transport
    _timer: asyncio.TimerHandle | None = None
    _phase: Any = None  # what the timer is for: IDLE (a head) or SEND_BODY, as h11 has it
    _heard = False  # a part of a head
    _since = 0.0  # when it was last there for a request

    def connection_made(self, transport: Any) -> None:
        """A client is there."""
        super().connection_made(transport)
        self._since = time.monotonic()
        if len(self._open()) > MOST and not self._made_room():
            self._end(_TOO_MANY)
            return
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A piece of a request."""
        self._heard = True
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """An answer went out; the next request may be there already."""
        self._heard = False
        self._since = time.monotonic()
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Sets the timer when what is waited for has changed."""
        phase = self.conn.their_state
        if self.transport.is_closing() or phase is self._phase:
            return
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seconds = {h11.IDLE: HEAD_S, h11.SEND_BODY: BODY_S + LEAVE_S}.get(phase)
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._late)

    def _late(self) -> None:
        self._timer = None
        self._end(_TOO_LATE if self._heard and self._phase is h11.IDLE else b"")

    def _end(self, last: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(last)
            self.transport.close()

    def _open(self) -> list[BoundedConnection]:
        every = [c for c in self.server_state.connections if isinstance(c, BoundedConnection)]
        return [each for each in every if not each.transport.is_closing()]

    def _made_room(self) -> bool:
        waiting = [c for c in self._open() if c is not self and c.conn.their_state is h11.IDLE]
        if not waiting:
            return False
        min(waiting, key=lambda each: each._since)._end(b"")
        return True
