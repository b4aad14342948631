# SPDX-License-Identifier: Apache-2.0
"""All sensors of the machine, gathered into the governor's snapshot.

Nothing is polled while nothing runs: then the loop wakes for udev's and the bus's news alone. While
work runs (`work(True)`), what sends no events is read every POLL_S beside the loop, and pressure
has triggers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from pvrd.bus import BusAddress, BusError, Connection
from pvrd.config import Config
from pvrd.governor import Snapshot
from pvrd.sensors.battery import Battery
from pvrd.sensors.compositor import Compositor
from pvrd.sensors.drm import Fdinfo
from pvrd.sensors.logind import Logind
from pvrd.sensors.pressure import Pressure
from pvrd.sensors.reading import Reading, Value, unknown
from pvrd.sensors.thermal import Thermal
from pvrd.sensors.udev import DeviceEvent, Udev

POLL_S = 2.0
_BACKOFF_S, _BACKOFF_MAX_S = 5.0, 30.0  # between tries for the system bus
_OFF = "sensors.system is false"
_FIELDS = frozenset(f.name for f in dataclasses.fields(Snapshot))


class Sensors:
    """The machine's sensors. `on_change` is called in the loop when one says something new.

    Set before start(), each optional: `on_device` gets a DeviceEvent of a GPU (add, remove,
    wedged), `logind.on_sleep` gets True before the system suspends and False when it is back.
    """

    def __init__(
        self, connection: Connection, config: Config, on_change: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._config = config
        self._on_change = on_change
        self.on_device: Callable[[DeviceEvent], None] | None = None
        self.pressure = Pressure(lambda kind: self._changed())
        self.thermal = Thermal()
        self.battery = Battery(self._changed)
        self.logind = Logind(self._changed)
        self.fdinfo = Fdinfo()
        self.compositor = Compositor(lambda: self.logind.active_uid)
        self.udev = Udev(self._device, self._power, self._heat)
        self._system: Connection | None = None  # a connection of our own to the system bus
        self._tasks: set[asyncio.Task[None]] = set()
        self._polling: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._due: set[str] = set()
        self._running = False
        self._told = False

    # -- life

    async def start(self) -> None:
        """Starts watching; what cannot be had is unknown, and never an error."""
        self._running = True
        if not self._config.flag("sensors.system"):
            return
        self.udev.start()
        await self._read_power()
        await self._read_slowly()
        if not await self._join():
            self._later(self._rejoin())

    async def stop(self) -> None:
        """Stops watching; lets go of the suspend lock."""
        self._running = False
        self.udev.stop()
        self._stop_polling()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._leave()

    def reconfigure(self, config: Config) -> None:
        """Values of a reload; sensors.system counts at the start alone."""
        self._config = config
        if not config.flag("sensors.fdinfo"):
            self.fdinfo.forget()

    # -- what the daemon tells

    def work(self, running: bool) -> None:
        """Work runs from now on, or none does any more."""
        if running == (self._polling is not None) or not self._running:
            return
        if not running:
            self._stop_polling()
        elif self._config.flag("sensors.system"):
            self.pressure.watch()
            self._polling = asyncio.get_running_loop().create_task(self._poll())

    def workers(self, pids: Iterable[int], node: str = "") -> None:
        """Our own processes, whose GPU time is not others'; our GPU's node when it is known."""
        self.fdinfo.own(pids, node)

    # -- what is known

    def snapshot(
        self,
        now: float,
        *,
        canary: float | None = None,
        holds: Iterable[str] = (),
        sleeping: bool = False,
        wedged: bool = False,
    ) -> Snapshot:
        """The machine at `now` (time.monotonic()), with what the daemon knows itself."""
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        missing: dict[str, str] = {}
        for reading in self.readings(now):
            if reading.name not in _FIELDS or reading.name in values:
                continue
            if reading.value is None:
                missing.setdefault(reading.name, reading.source)
            else:
                values[reading.name] = reading.value
                sources[reading.name] = reading.source
        if canary is not None:
            sources["canary"] = "the GPU worker"
        for name in sources:
            missing.pop(name, None)
        return Snapshot(
            time_s=now, canary=canary, holds=tuple(holds),
            sleeping=sleeping or self.logind.sleeping, wedged=wedged, sources=sources,
            unknown=missing, **values,
        )  # fmt: skip

    def readings(self, now: float) -> list[Reading]:
        """Every value; of two with one name the first that is known counts."""
        if not self._config.flag("sensors.system"):
            return self.compositor.readings(now)
        lid = self.battery.lid_closed
        out = [
            *(
                self.fdinfo.readings(now)
                if self._config.flag("sensors.fdinfo")
                else [unknown("others_gpu", "sensors.fdinfo is false", "share")]
            ),
            *self.compositor.readings(now),
            *self.pressure.readings(),
            *self.thermal.readings(now),
            *self.battery.readings(),
            *([lid] if lid is not None else []),  # UPower's comes with a signal
            *self.logind.readings(),
        ]
        if self.pressure.refused:
            out.append(unknown("psi_triggers", self.pressure.refused))
        if not self.udev.absent:
            out.append(Reading("udev", self.udev.events, self.udev.source, "events"))
        else:
            out.append(unknown("udev", self.udev.absent))
        return out

    def describe(self, now: float | None = None) -> list[dict[str, Value]]:
        """Rows {name, value, source, unit} for status and doctor; the value "unknown" has the
        reason as its source. `refresh` before makes them new.
        """
        known: dict[str, Reading] = {}
        for reading in self.readings(time.monotonic() if now is None else now):
            old = known.get(reading.name)
            if old is None or (old.value is None and reading.value is not None):
                known[reading.name] = reading
        if not self._config.flag("sensors.system"):
            known["system"] = unknown("system", _OFF)
        return [reading.described() for reading in known.values()]

    async def refresh(self) -> None:
        """Reads everything that can be read now, once."""
        if not self._running or not self._config.flag("sensors.system"):
            return
        await self._read_power()
        await self.logind.read()
        await self._read_slowly()

    # -- the system bus

    async def _join(self) -> bool:
        """The services of the system bus, over our own connection when it leads there. False when
        the bus is not there, or does not answer.
        """
        address = BusAddress.parse("system")
        connection = self._connection
        if connection.address != address:
            try:
                connection = await Connection.connect(address)
            except BusError as e:
                self.logind.stop(e.message)
                return False
            self._system = connection
            connection.closed.add_done_callback(self._lost)
        try:
            await self.logind.start(connection)
            await self.battery.start(connection)
        except BusError as e:
            self._leave(e.message)
            self._changed()
            return False
        self._changed()
        return True

    async def _rejoin(self) -> None:
        seconds = _BACKOFF_S
        while True:
            await asyncio.sleep(seconds)
            if await self._join():
                return
            seconds = min(seconds * 2, _BACKOFF_MAX_S)

    def _lost(self, done: asyncio.Future[str]) -> None:
        if self._system is None or not self._running:
            return
        self._leave()
        self._later(self._rejoin())
        self._changed()

    def _leave(self, why: str = "the system bus is lost") -> None:
        self.logind.stop(why)
        self.battery.stop()
        if self._system is not None:
            system, self._system = self._system, None
            system.close()

    # -- reading

    async def _poll(self) -> None:
        while True:
            await self._read_slowly()
            self._changed()  # pressure and others' GPU time have moved, too
            await asyncio.sleep(POLL_S)

    async def _read_slowly(self) -> None:
        fdinfo = self._config.flag("sensors.fdinfo")

        def read() -> bool:
            now = time.monotonic()
            if fdinfo:
                self.fdinfo.read(now)
            return self.thermal.read(now)

        async with self._reading:
            self._due.discard("heat")
            changed = await asyncio.to_thread(read)
        if changed:
            self._changed()

    def _stop_polling(self) -> None:
        self.pressure.ignore()
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None
        self.fdinfo.forget()

    async def _read_power(self) -> None:
        async with self._reading:
            self._due.discard("power")  # events from here on need another look
            changed = await asyncio.to_thread(self.battery.read)
        if changed:
            self._changed()

    def _power(self) -> None:
        self._look("power", self._read_power)

    def _heat(self) -> None:
        self._look("heat", self._read_slowly)

    def _look(self, what: str, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Reads soon; once for all the events that come until it begins."""
        if what not in self._due:
            self._due.add(what)
            self._later(read())

    def _device(self, event: DeviceEvent) -> None:
        if self.on_device is not None:
            self.on_device(event)
        self._changed()

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _changed(self) -> None:
        """One call of on_change a turn of the loop, whatever came in it."""
        if self._told or not self._running:
            return
        self._told = True
        asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._told = False
        if self._running:
            self._on_change()
