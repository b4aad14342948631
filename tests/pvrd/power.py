# SPDX-License-Identifier: Apache-2.0
"""A system bus of the test's own with python-dbusmock's power-profiles-daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator

from pvrd.bus import PROPERTIES, BusAddress, BusError, Connection, V
from tests.buses import started_bus

LONG = 30.0
PROFILES, PATH = "net.hadess.PowerProfiles", "/net/hadess/PowerProfiles"
# Debian's, which has the bindings that dbusmock needs.
PYTHON = "/usr/bin/python3"


class Power:
    """A mocked power-profiles-daemon on a system bus of its own."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._loop = asyncio.new_event_loop()
        self._mock = subprocess.Popen(
            [PYTHON, "-m", "dbusmock", "--system", "-t", "power_profiles_daemon",
             "-p", '{"ActiveProfile": "balanced"}'],
            env={**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": address},
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self._connection = self._loop.run_until_complete(
            Connection.connect(BusAddress.parse(address))
        )

    def saver(self, on: bool) -> bool:
        """Chooses the profile; False while the mock is not there."""
        value = V("s", "power-saver" if on else "balanced")
        call = self._connection.call(
            PROFILES, PATH, PROPERTIES, "Set", "ssv", [PROFILES, "ActiveProfile", value]
        )
        try:
            self._loop.run_until_complete(call).close()
        except BusError:
            return False
        return True

    def close(self) -> None:
        self._connection.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
        self._mock.kill()
        self._mock.wait(LONG)


@contextlib.contextmanager
def power_profiles() -> Iterator[Power]:
    """The bus and the mock, to the end of the block."""
    with started_bus() as bus, contextlib.closing(Power(bus.address)) as mocked:
        yield mocked
