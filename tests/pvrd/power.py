# SPDX-License-Identifier: Apache-2.0
"""A system bus of the test's own with python-dbusmock's power-profiles-daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from pvrd.bus import PROPERTIES, BusError
from pvrd.bus_values import V
from tests.buses import started_bus
from tests.pvrd.mocks import Mocked


class Power(Mocked):
    """A mocked power-profiles-daemon on a system bus of its own."""

    name, path = "net.hadess.PowerProfiles", "/net/hadess/PowerProfiles"

    def __init__(self, address: str) -> None:
        super().__init__(address, "power_profiles_daemon", '{"ActiveProfile": "balanced"}')

    def saver(self, on: bool) -> bool:
        """Chooses the profile; False while the mock is not there."""
        value = V("s", "power-saver" if on else "balanced")
        try:
            self.call(PROPERTIES, "Set", "ssv", [self.name, "ActiveProfile", value])
        except BusError:
            return False
        return True


@contextmanager
def power_profiles() -> Iterator[Power]:
    """The bus and the mock, to the end of the block."""
    with started_bus() as bus, closing(Power(bus.address)) as mocked:
        yield mocked
