# SPDX-License-Identifier: Apache-2.0
"""uvicorn's server with a bound on how long it takes to end."""

from __future__ import annotations

import asyncio
import socket

import uvicorn


class Server(uvicorn.Server):
    """Answers that are still under way `grace` seconds after SIGTERM are broken off.

    uvicorn has an option for that since 0.22; Debian 12 has 0.17.
    """

    def __init__(self, config: uvicorn.Config, grace: float) -> None:
        super().__init__(config)
        self._grace = grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends when all connections have."""
        cut = asyncio.get_running_loop().call_later(self._grace, self._break_off)
        try:
            await super().shutdown(sockets=sockets)
        finally:
            cut.cancel()

    def _break_off(self) -> None:
        for task in list(self.server_state.tasks):
            task.cancel()
