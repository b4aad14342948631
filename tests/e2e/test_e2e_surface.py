# SPDX-License-Identifier: Apache-2.0
"""A video session whose window the compositor does not show: Weston without a screen, the example's
player, and a GPU in software.
"""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pvrd.agent.wire import Wire, socket_path
from pvrd.client_async import AsyncClient
from tests.daemons import Daemon
from tests.pvrd.agent.test_agent_weston import Weston

pytestmark = [pytest.mark.bus, pytest.mark.gpu]
ROOT = Path(__file__).resolve().parents[2]
LONG_S, LOOK_S = 120.0, 0.05
SETTINGS = {
    "width": 64, "height": 48, "model": "fast", "unchanged": "off", "device": "gpu", "share": 50,
}  # fmt: skip


@pytest.fixture
def weston(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> Iterator[Weston]:
    folder = tmp_path_factory.mktemp("weston")
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-t")
    compositor = Weston(folder)
    compositor.start()
    yield compositor
    compositor.end()


class Scene:
    """The player's window, its session, and what is seen of both."""

    def __init__(self, client: AsyncClient, video: Any, window: Any) -> None:
        self.client, self.video, self.window = client, video, window
        self.shown = 0

    async def play(self) -> None:
        async def frames() -> AsyncIterator[list[Any]]:
            number = 0
            while True:
                number += 1
                sides = ((48, 64), (24, 32), (24, 32))
                yield [np.full(side, number % 200, np.uint8) for side in sides]

        async for _, planes in self.video.enlarge(frames()):
            await self.window.show(planes)
            self.shown += 1

    async def comes(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        async with asyncio.timeout(LONG_S):
            while not await condition():
                await asyncio.sleep(LOOK_S)
        assert await condition(), what

    async def state(self, name: str) -> Any:
        return (await self.video.properties())[name]

    async def models(self) -> list[str]:
        """What the GPU worker has in its memory."""
        found: list[str] = (await self.client.statistics())["gpu"]["models"]
        return found

    async def more(self) -> None:
        """Frames are shown."""
        goal = self.shown + 3

        async def there() -> bool:
            return self.shown >= goal

        await self.comes(there, "frames")


async def scene(made: Daemon) -> None:
    player = runpy.run_path(str(ROOT / "examples/player.py"))
    async with (
        await AsyncClient.connect(made.address) as client,
        await client.open_video(SETTINGS) as video,
    ):
        wire = await Wire.connect(socket_path())
        window = player["Window"](wire, video)
        await window.open("a test")
        on = Scene(client, video, window)
        playing = asyncio.ensure_future(on.play())
        await on.more()
        levels = await on.state("Levels")
        assert not await on.state("Paused")
        assert await on.models() == ["nsr-fast"]

        window.top("set_minimized")  # Weston asks a window that it does not show for no frame

        async def paused() -> bool:
            return bool(await on.state("Paused"))

        async def empty() -> bool:
            return not await on.models()

        await on.comes(paused, "the client's word")
        await on.comes(empty, "nothing of it in the GPU worker")
        shown = on.shown
        other = await client.open_text({"model": "tiny", "share": 60})  # its share is free, too
        await other.close()
        assert (await on.state("Levels"), on.shown) == (levels, shown)

        # There is no request for a window to come back; one that is mapped anew is on the screen.
        window.surface("attach", None, 0, 0)
        window.surface("commit")
        window.surface("commit")
        await wire.roundtrip(LONG_S)
        window.commit()
        await on.more()
        assert not await paused()
        assert await on.state("Device") == "gpu"
        assert "nsr-fast" in await on.models()
        assert await on.state("Levels") == levels
        assert not playing.done()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        wire.close()


def test_a_session_pauses_while_its_window_is_hidden(
    daemon: Callable[..., Daemon], weston: Weston
) -> None:
    made = daemon(
        {"gpu.allow_software": True, "governor.enabled": False, "models.keep_s": 0.5}
    )
    with made.client() as client:
        made.ready(client, "gpu")
    asyncio.run(scene(made))
