# SPDX-License-Identifier: Apache-2.0
"""pvr-portal: serves the proposed language portal's backend on the user's bus."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from pvrd import systemd
from pvrd.bus import BusAddress, BusError, Connection
from pvrd.client_async import AsyncClient
from pvrd.errors import PvrdError
from pvrd.portal.backend import NAME, Backend


async def _run(bus: str | None, session_bus: str, context: int) -> str:
    """Serves until it is told to end, or the bus is lost: why, else empty."""
    connection = await Connection.connect(BusAddress.parse(session_bus))
    try:
        async with await AsyncClient.connect(bus, wait=10.0) as client:
            Backend(connection, client, context)
            await connection.request_name(NAME)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, connection.close)
            systemd.log(systemd.INFO, f"pvr-portal serves {NAME}")
            systemd.notify(READY=1)
            return await connection.closed
    finally:
        connection.close()


def main() -> int:
    """The program. Exit codes: 0; 1 it cannot start, or the bus is lost; 2 usage."""
    parser = argparse.ArgumentParser(
        prog="pvr-portal", description="A backend for the language portal that was proposed."
    )
    parser.add_argument("--bus", metavar="BUS", help="of pvrd: user, system or an address")
    parser.add_argument(
        "--session-bus", default="user", metavar="BUS", help="of the portal (default: user)"
    )
    parser.add_argument("--context", type=int, default=2048, help="tokens of a session (2048)")
    args = parser.parse_args()
    try:
        reason = asyncio.run(_run(args.bus, args.session_bus, args.context))
    except (BusError, PvrdError) as error:
        reason = str(error)
    if reason:
        print(f"pvr-portal: {reason}", file=sys.stderr)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
