#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows a y4m clip (8-bit 4:2:0) enlarged in a Wayland window, by shared memory.

    player.py [--hold] CLIP

Frames go through pvrd's ring by asyncio; the Wayland wire is pvr-agent's. While the window is not
on the screen (the compositor asks for no frame) the session is paused, so that its memory and its
share are for others. Ends with the clip, with --hold five seconds later, or when the window is
closed. It needs pvrd, dbus-next and numpy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from pvrd import y4m
from pvrd.agent import protocol
from pvrd.agent.wire import NEW, Proxy, WaylandError, Wire, socket_path
from pvrd.client_async import AsyncClient
from pvrd.client_async_video import AsyncVideoSession
from pvrd.errors import PvrdError

XRGB8888 = 1
ANSWER_S = 5.0
QUIET_S = 1.0  # without a frame callback: the window is not on the screen
HIDDEN_S = 1e6


class Window:
    """A window of the size of a session's frames, with two buffers in turn."""

    def __init__(self, wire: Wire, video: AsyncVideoSession) -> None:
        self._wire = wire
        self._video = video
        self._size = video.layout["out_width"], video.layout["out_height"]
        self._globals: dict[str, Proxy] = {}
        self.configured = asyncio.get_running_loop().create_future()
        self.closed = False
        self._wanted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, title: str) -> None:
        """Maps it."""
        registry = self._wire.display.make("get_registry", protocol.REGISTRY, NEW)

        def found(name: int, interface: str, _version: int) -> None:
            wanted = protocol.GLOBALS.get(interface)
            if wanted is not None:
                bound = registry.make("bind", wanted, name, interface, 1, NEW)
                self._globals[interface] = bound
                if wanted is protocol.WM_BASE:
                    bound.on["ping"] = lambda serial: bound("pong", serial)

        registry.on["global"] = found
        await self._wire.roundtrip(ANSWER_S)
        self.surface = self._globals["wl_compositor"].make("create_surface", protocol.SURFACE, NEW)
        shell = self._globals["xdg_wm_base"].make(
            "get_xdg_surface", protocol.XDG_SURFACE, NEW, self.surface
        )
        self.top = shell.make("get_toplevel", protocol.TOPLEVEL, NEW)
        self.top("set_title", title)
        self.top.on["close"] = self._close

        def configure(serial: int) -> None:
            shell("ack_configure", serial)
            if not self.configured.done():
                self.configured.set_result(None)

        shell.on["configure"] = configure
        self.surface("commit")
        await self._wire.first(self.configured, ANSWER_S)
        width, height = self._size
        size = width * height * 4
        memory = os.memfd_create("player", os.MFD_CLOEXEC)
        os.ftruncate(memory, 2 * size)
        pool = self._globals["wl_shm"].make("create_pool", protocol.SHM_POOL, NEW, memory, 2 * size)
        self._map = mmap.mmap(memory, 2 * size)
        os.close(memory)
        self._pixels = np.ndarray((2, height, width, 4), np.uint8, self._map)
        self._buffers = [
            pool.make("create_buffer", protocol.BUFFER, NEW, i * size, width, height, 4 * width,
                      XRGB8888)
            for i in range(2)
        ]  # fmt: skip
        self._turn, self._shown = 0, self._buffers[0]

    def _close(self) -> None:
        self.closed = True
        self._next()

    def _next(self, _time: int = 0) -> None:
        if not self._wanted.done():
            self._wanted.set_result(None)

    async def show(self, planes: list[Any]) -> None:
        """Draws a frame and waits until the compositor wants the next one, or somebody closes the
        window; pauses the session while it wants none."""
        luma, blue, red = (plane.astype(np.int32) for plane in planes)
        height, width = luma.shape
        blue, red = (c.repeat(2, 0).repeat(2, 1)[:height, :width] - 128 for c in (blue, red))
        bright = 298 * (luma - 16) + 128  # BT.601, limited range, in 256ths
        pixels = self._pixels[self._turn]
        pixels[..., 3] = 255  # Weston's pixman shows black without it, though X is to be ignored
        pixels[..., 0] = (bright + 516 * blue >> 8).clip(0, 255)
        pixels[..., 1] = (bright - 100 * blue - 208 * red >> 8).clip(0, 255)
        pixels[..., 2] = (bright + 409 * red >> 8).clip(0, 255)
        self._wanted = asyncio.get_running_loop().create_future()
        callback = self.surface.make("frame", protocol.CALLBACK, NEW)
        callback.on["done"] = self._next
        self._shown = self._buffers[self._turn]
        self._turn = 1 - self._turn
        self.commit()
        try:
            await self._wire.first(self._wanted, QUIET_S)
        except TimeoutError:
            await self._video.pause()
            await self._wire.first(self._wanted, HIDDEN_S)
            await self._video.pause(False)

    def commit(self) -> None:
        """Puts the frame that was drawn last on the surface."""
        self.surface("attach", self._shown, 0, 0)
        self.surface("damage", 0, 0, *self._size)
        self.surface("commit")


async def play(path: str, hold: bool) -> None:
    """The program.

    Raises:
        OSError, y4m.Y4mError: there is no such clip. PvrdError: what pvrd said. WaylandError,
        TimeoutError: the compositor is not there, or says nothing.
    """
    with open(path, "rb", buffering=0) as file:
        reader = y4m.Reader(file.fileno())
        header = reader.header()
        if header.pixel != "i420" or header.bits != 8:
            raise y4m.Y4mError("The clip is not 8-bit 4:2:0 (ffmpeg: -pix_fmt yuv420p).")

        async def frames() -> AsyncIterator[list[Any]]:
            memory = bytearray(header.frame_bytes)
            while reader.read_frame([memoryview(memory)]):
                at, planes = 0, []
                for width, height in header.planes:
                    plane = np.frombuffer(memory, np.uint8, width * height, at)
                    planes.append(plane.reshape(height, width))
                    at += width * height
                yield planes

        wire = await Wire.connect(socket_path())
        settings = {"width": header.width, "height": header.height, "siting": header.siting}
        async with (
            await AsyncClient.connect() as client,
            await client.open_video(settings) as video,
        ):
            window = Window(wire, video)
            await window.open(f"{os.path.basename(path)}, enlarged")
            shown = 0
            async with contextlib.aclosing(video.enlarge(frames())) as enlarged:
                async for _done, planes in enlarged:
                    await window.show(planes)
                    shown += 1
                    if window.closed:
                        break
            print(f"{shown} frames", flush=True)
            if hold and not window.closed:
                await asyncio.sleep(5)
        wire.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clip", metavar="CLIP")
    parser.add_argument("--hold", action="store_true", help="show the last frame for 5 seconds")
    args = parser.parse_args()
    try:
        asyncio.run(play(args.clip, args.hold))
    except (OSError, y4m.Y4mError, PvrdError, WaylandError) as error:
        print(f"player: {error or 'the compositor does not answer'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
