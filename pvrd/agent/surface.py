# SPDX-License-Identifier: Apache-2.0
"""One transparent pixel on the screen, and when the compositor shows it.

A surface without a role is never presented. What a user does not see is a surface of the layer
shell (wlroots' compositors, KWin, COSMIC): of the layer `top`, in a corner, without input; windows
in full screen lie above it, so that it keeps none of them from being scanned out directly. Where
there is no layer shell (GNOME, Weston) a plain window is all there is: it takes a place among the
user's windows, so it is made only where the user said so.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from pvrd.agent import protocol
from pvrd.agent.measure import Frame
from pvrd.agent.wire import NEW, Proxy, WaylandError, Wire, socket_path

ANSWER_S = 2.0  # for a compositor to say what it has, and to map a surface
_ARGB8888 = 0
_LAYER_TOP = 2
_TOP_LEFT = 1 | 4


class Unknown(Exception):
    """Nothing can be measured here; one sentence why."""


class Stuck(Exception):
    """The compositor answers nothing at all."""


class Surface:
    """The pixel, from open() to close()."""

    def __init__(self, wire: Wire, window: bool) -> None:
        self._wire = wire
        self._window = window
        self._globals: dict[str, Proxy] = {}
        self._clock = -1
        self._configured: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shell: Proxy
        self._surface: Proxy
        self._buffer: Proxy

    @classmethod
    async def open(cls, window: bool) -> Surface:
        """Connects to the session's compositor and puts the pixel there.

        Args:
            window: a plain window is allowed where there is no layer shell.

        Raises:
            Unknown: there is no compositor, or not one that can tell.
            Stuck: it does not answer.
        """
        try:
            wire = await Wire.connect(socket_path())
        except WaylandError as e:
            raise Unknown(str(e)) from None
        self = cls(wire, window)
        try:
            await self._set_up()
        except BaseException as e:
            wire.close()
            if isinstance(e, WaylandError):
                raise Unknown(str(e)) from None
            if isinstance(e, TimeoutError):
                raise Stuck from None
            raise
        return self

    def close(self) -> None:
        """Takes the pixel away and ends the connection."""
        self._wire.close()

    async def _set_up(self) -> None:
        wire = self._wire
        registry = wire.display.make("get_registry", protocol.REGISTRY, NEW)

        def found(name: int, interface: str, version: int) -> None:
            wanted = protocol.GLOBALS.get(interface)
            if wanted is not None and interface not in self._globals:
                bound = registry.make("bind", wanted, name, interface, 1, NEW)
                self._globals[interface] = bound
                if wanted is protocol.PRESENTATION:
                    bound.on["clock_id"] = self._on_clock
                elif wanted is protocol.WM_BASE:
                    bound.on["ping"] = lambda serial: bound("pong", serial)

        registry.on["global"] = found
        await wire.roundtrip(ANSWER_S)
        await wire.roundtrip(ANSWER_S)  # for the clock, which comes after the binding
        for needed, what in (
            (protocol.PRESENTATION, "does not tell when frames are shown (no wp_presentation)"),
            (protocol.COMPOSITOR, "has no surfaces"),
            (protocol.SHM, "takes no shared memory"),
        ):
            if needed.name not in self._globals:
                raise Unknown(f"the compositor {what}")
        if self._clock < 0:
            raise Unknown("the compositor does not name its presentation clock")
        self._surface = self._globals["wl_compositor"].make("create_surface", protocol.SURFACE, NEW)
        nothing = self._globals["wl_compositor"].make("create_region", protocol.REGION, NEW)
        self._surface("set_input_region", nothing)
        nothing("destroy")
        self._give_role()
        self._surface("commit")
        await wire.first(self._configured, ANSWER_S)
        self._buffer = self._pixel()

    def _on_clock(self, clock: int) -> None:
        self._clock = clock

    def _give_role(self) -> None:
        layers = self._globals.get("zwlr_layer_shell_v1")
        base = self._globals.get("xdg_wm_base")
        if layers is not None:
            shell = layers.make(
                "get_layer_surface", protocol.LAYER_SURFACE,
                NEW, self._surface, None, _LAYER_TOP, "pvr-agent",
            )  # fmt: skip
            shell("set_size", 1, 1)
            shell("set_anchor", _TOP_LEFT)
            shell("set_exclusive_zone", -1)  # beside nobody, nobody beside it
            shell.on["configure"] = lambda serial, *_: self._acknowledge(shell, serial)
            shell.on["closed"] = self._taken_away
        elif base is not None and self._window:
            shell = base.make("get_xdg_surface", protocol.XDG_SURFACE, NEW, self._surface)
            window = shell.make("get_toplevel", protocol.TOPLEVEL, NEW)
            window("set_title", "pvr-agent")
            window("set_app_id", "org.pvrd.Agent")
            shell.on["configure"] = lambda serial: self._acknowledge(shell, serial)
            window.on["close"] = self._taken_away
        else:
            raise Unknown(
                "the compositor has no layer shell, and a window of pvr-agent's own was not "
                "allowed (--window)"
            )

    def _acknowledge(self, shell: Proxy, serial: int) -> None:
        shell("ack_configure", serial)
        if not self._configured.done():
            self._configured.set_result(None)

    def _taken_away(self) -> None:
        self._wire.lose("the surface was closed by the user or the compositor")

    def _pixel(self) -> Proxy:
        """A buffer of 1 x 1, all zero: transparent."""
        memory = os.memfd_create("pvr-agent", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, 4)
            pool = self._globals["wl_shm"].make("create_pool", protocol.SHM_POOL, NEW, memory, 4)
        finally:
            os.close(memory)
        buffer = pool.make("create_buffer", protocol.BUFFER, NEW, 0, 1, 1, 4, _ARGB8888)
        pool("destroy")
        return buffer

    def now(self) -> int:
        """The presentation clock, in ns."""
        return time.clock_gettime_ns(self._clock)

    async def frames(self, count: int, timeout: float) -> list[Frame | None]:
        """Commits so many frames, each when the compositor asks for it (as animations do), and
        waits until they were shown; None for those that it left out.

        Raises:
            Unknown: the compositor is gone, or answers but does not show the surface.
            Stuck: it answers nothing within `timeout` seconds.
        """
        shown = []
        before = _waited()
        for _ in range(count):
            now = _waited()
            asked, frame = self._commit(now - before)
            before = now
            shown.append(frame)
            await self._answer(asked, timeout)
        for frame in shown:
            await self._answer(frame, timeout)
        return [frame.result() for frame in shown]

    def _commit(self, waited: int) -> tuple[asyncio.Future[None], asyncio.Future[Frame | None]]:
        """A frame; done when the compositor asks for the next, and when it is shown."""
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[None] = loop.create_future()
        shown: asyncio.Future[Frame | None] = loop.create_future()
        committed = 0

        def next_one(_: int) -> None:
            if not asked.done():
                asked.set_result(None)

        def presented(
            hi: int, lo: int, ns: int, refresh: int, seq_hi: int, seq_lo: int, _: int
        ) -> None:
            at = (hi << 32 | lo) * 1_000_000_000 + ns
            if not shown.done():
                shown.set_result(Frame(committed, at, refresh, seq_hi << 32 | seq_lo, waited))

        def discarded() -> None:
            if not shown.done():
                shown.set_result(None)

        try:
            callback = self._surface.make("frame", protocol.CALLBACK, NEW)
            callback.on["done"] = next_one
            feedback = self._globals["wp_presentation"].make(
                "feedback", protocol.FEEDBACK, self._surface, NEW
            )
            events: dict[str, Any] = {"presented": presented, "discarded": discarded}
            feedback.on.update(events)
            self._surface("attach", self._buffer, 0, 0)
            self._surface("damage", 0, 0, 1, 1)
            self._surface("commit")
        except WaylandError as e:
            raise Unknown(str(e)) from None
        committed = self.now()
        return asked, shown

    async def _answer(self, future: asyncio.Future[Any], timeout: float) -> None:
        try:
            await self._wire.first(future, timeout)
        except WaylandError as e:
            raise Unknown(str(e)) from None
        except TimeoutError:
            try:
                await self._wire.roundtrip(timeout)
            except TimeoutError:
                raise Stuck from None
            except WaylandError as e:
                raise Unknown(str(e)) from None
            if not future.done():
                raise Unknown(
                    "the compositor does not show the surface: it is hidden, or the screen is off"
                ) from None


def _waited() -> int:
    """ns that this process waited for a processor so far; 0 where the kernel does not count."""
    try:
        return int(Path("/proc/self/schedstat").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
