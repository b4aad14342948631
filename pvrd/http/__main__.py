# SPDX-License-Identifier: Apache-2.0
"""pvr-http: OpenAI's HTTP API on a loopback port, answered by pvrd."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys

from pvrd import systemd
from pvrd.errors import PvrdError, StartError
from pvrd.http import token

PORT = 8642
LOOPBACK = ("127.0.0.1", "::1")
GRACE_S = 5.0  # how long answers may go on once the program is to end


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pvr-http",
        description="Answers OpenAI's HTTP API on a loopback port, as a client of pvrd.",
        epilog="Base address for clients: http://127.0.0.1:PORT/v1. See docs/http.md.",
    )
    parser.add_argument("--bus", metavar="BUS", help="user, system or an address")
    parser.add_argument("--host", choices=LOOPBACK, default=LOOPBACK[0])
    parser.add_argument("--port", type=int, default=PORT, help=f"default {PORT}; 0: any free one")
    parser.add_argument(
        "--sessions", type=int, default=8, help="answers at a time, at most (default 8)"
    )
    parser.add_argument(
        "--context", type=int, default=2048, help="tokens of prompt and answer (default 2048)"
    )
    parser.add_argument(
        "--print-token", action="store_true", help="tell the token that clients need, and end"
    )
    parser.add_argument("--new-token", action="store_true", help="make a new token, and end")
    return parser


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(64)
    except (OSError, OverflowError) as error:
        sock.close()
        why = error.strerror if isinstance(error, OSError) else "a port is 0 to 65535"
        raise StartError(f"port {port} of {host} cannot be had: {why}") from error
    return sock


class _Journal(logging.Handler):
    """What the server has to say, a line each and without a trace."""

    def emit(self, record: logging.LogRecord) -> None:
        fault = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
        text = record.getMessage().strip().partition("\n")[0]
        systemd.log(systemd.WARNING, f"pvr-http: {text} {fault}".rstrip())


async def _serve(args: argparse.Namespace, secret: str) -> int:
    try:
        import uvicorn

        from pvrd.http.app import application
        from pvrd.http.connection import BoundedConnection
        from pvrd.http.server import Server
    except ImportError as error:
        missing = error.name or "starlette"
        raise StartError(f"{missing} is not installed; pip install 'pvrd[http]'") from error
    from pvrd.client_async import AsyncClient

    log = logging.getLogger("uvicorn")
    log.addHandler(_Journal(logging.WARNING))
    log.propagate = False
    with _listen(args.host, args.port) as sock:
        shown = f"[{args.host}]" if ":" in args.host else args.host
        where = f"http://{shown}:{sock.getsockname()[1]}/v1"

        def ready() -> None:
            systemd.log(systemd.INFO, f"pvr-http answers at {where}")
            systemd.notify(READY=1, STATUS=f"Answers at {where}")

        try:
            client = await AsyncClient.connect(args.bus, wait=10.0)
        except PvrdError as error:
            raise StartError(str(error)) from error
        async with client:
            config = uvicorn.Config(
                application(secret, client, args.sessions, args.context, ready),
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                http=BoundedConnection,
                ws="none",
            )
            await Server(config, GRACE_S).serve(sockets=[sock])
    return 0


def main() -> int:
    """The program. Exit codes: 0; 1 it cannot start; 2 usage."""
    parser = _arguments()
    args = parser.parse_args()
    if not 1 <= args.sessions <= 64 or not 16 <= args.context <= 1 << 20:
        parser.error("--sessions is 1 to 64, --context 16 to 1048576")
    try:
        secret = token.read(token.path(), renew=args.new_token)
        if args.print_token or args.new_token:
            print(secret)
            return 0
        return asyncio.run(_serve(args, secret))
    except StartError as error:
        print(f"pvr-http: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
