# SPDX-License-Identifier: Apache-2.0
"""Services of a system bus as python-dbusmock plays them, on a bus of the test's own."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from pvrd.bus import BusAddress, Connection
from pvrd.bus_values import plain

LONG = 30.0
PYTHON = "/usr/bin/python3"  # Debian's, which has the bindings that dbusmock needs


class SystemBus:
    """A private bus on which services are mocked."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._mocks: dict[str, subprocess.Popen[bytes]] = {}

    def mock(self, template: str, parameters: str = "{}") -> None:
        """Starts a mocked service; it comes up by itself."""
        self._mocks[template] = subprocess.Popen(
            [PYTHON, "-m", "dbusmock", "--system", "-t", template, "-p", parameters],
            env={**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": self.address},
            stdout=subprocess.DEVNULL,
        )

    def end(self, template: str) -> None:
        """Ends one, as a crash does."""
        process = self._mocks.pop(template)
        process.kill()
        process.wait(LONG)

    def close(self) -> None:
        for template in list(self._mocks):
            self.end(template)


class Mocked(SystemBus):
    """One mocked service, and a connection that asks it and waits. `name` and `path` are its."""

    name, path = "", ""

    def __init__(self, address: str, template: str, parameters: str = "{}") -> None:
        super().__init__(address)
        self.mock(template, parameters)
        self._loop = asyncio.new_event_loop()
        self._connection = self._loop.run_until_complete(
            Connection.connect(BusAddress.parse(address))
        )

    def call(
        self, interface: str, member: str, signature: str = "", body: Sequence[Any] = ()
    ) -> Any:
        """What a method answers first.

        Raises:
            BusError: the mock is not there yet, among others.
        """
        reply = self._loop.run_until_complete(
            self._connection.call(self.name, self.path, interface, member, signature, body)
        )
        reply.close()
        return plain(reply.body[0]) if reply.body else None

    def close(self) -> None:
        self._connection.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        super().close()
