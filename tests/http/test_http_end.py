# SPDX-License-Identifier: Apache-2.0
"""pvr-http's server ends though an answer would not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

from pvrd.http.server import Server


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """An application whose answer begins and never ends."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    await asyncio.Event().wait()


def test_an_answer_without_end_is_broken_off() -> None:
    async def run() -> bytes:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            config = uvicorn.Config(endless, log_config=None, lifespan="off", ws="none")
            server = Server(config, grace=0.05)
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            said = await reader.readuntil(b"begun")
            server.should_exit = True
            await asyncio.wait_for(serving, 60)
            said += await reader.read()
            writer.close()
            return said

    said = asyncio.run(run())
    assert said.startswith(b"HTTP/1.1 200")
    assert not said.endswith(b"0\r\n\r\n"), "an answer that was broken off does not look whole"
