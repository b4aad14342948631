# SPDX-License-Identifier: Apache-2.0
"""The Python client, blocking and with asyncio, beside a real daemon that is restarted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from pvrd.client import Client, NoDaemon
from pvrd.client_async import AsyncClient
from pvrd.errors import Busy, InvalidArgument, NoSuchSession, PvrdError, UnknownModel
from tests.buses import until
from tests.daemons import PROMPT, Restartable

pytestmark = pytest.mark.bus

FRAME = {"width": 70, "height": 38, "model": "nsr-fast"}
TINY = {"model": "tiny"}


def ramp(seq: int, depth: int = 8) -> list[np.ndarray]:
    kind, scale = (np.uint8, 1) if depth == 8 else (np.uint16, 256)
    shapes = [(38, 70), (19, 35), (19, 35)]
    return [
        (np.add.outer(np.arange(h) * 2, np.arange(w) * 2 + seq) % 220 * scale).astype(kind)
        for h, w in shapes
    ]


def blocking_answer(client: Client) -> str:
    with client.open_text(TINY) as session:
        stream = session.generate(PROMPT, {"max_tokens": 12})
        return "".join(event.get("text", "") for event in stream)


def test_tokens_by_asyncio_are_those_of_the_blocking_client(pvrd: Restartable) -> None:
    async def ask() -> tuple[str, dict[str, Any], int]:
        async with await AsyncClient.connect(pvrd.address) as client:
            assert any(model["name"] == "tiny" for model in await client.models())
            async with await client.open_text(TINY) as session:
                job = session.generate(PROMPT, {"max_tokens": 12})
                text = await job.text()
                return text, job.end, await session.count_tokens(PROMPT)

    text, end, count = asyncio.run(ask())
    with Client(pvrd.address) as client:
        assert text == blocking_answer(client)
        with client.open_text(TINY) as session:
            assert count == session.count_tokens(PROMPT)
    assert end["reason"] == "length"


def test_the_blocking_client_works_where_a_loop_runs(pvrd: Restartable) -> None:
    """As in a notebook, and in programs whose coroutines call functions of others."""

    async def inside() -> str:
        with Client(pvrd.address) as client:
            with pytest.raises(UnknownModel, match="no-such"):
                client.open_text({"model": "no-such"})
            text = blocking_answer(client)
        with pytest.raises(NoDaemon, match="closed"):
            client.models()
        await asyncio.sleep(0)
        return text

    with Client(pvrd.address) as client:
        assert asyncio.run(inside()) == blocking_answer(client)


def test_caches_of_int8_can_be_asked_for(pvrd: Restartable) -> None:
    with Client(pvrd.address) as client, client.open_text({**TINY, "kv": "q8"}) as session:
        assert "".join(e.get("text", "") for e in session.generate(PROMPT, {"max_tokens": 4}))


def test_two_sessions_at_once_and_leaving_an_iterator_cancels(pvrd: Restartable) -> None:
    async def ask() -> None:
        async with await AsyncClient.connect(pvrd.address) as client:
            first, second = [await client.open_text(TINY) for _ in range(2)]
            job = first.generate(PROMPT, {"max_tokens": 200})
            stream = job.tokens()
            await anext(stream)
            whole = await second.generate(PROMPT, {"max_tokens": 5}).text()
            assert whole
            await stream.aclose()
            # The session is free again as soon as the daemon saw the pipe close.
            while True:
                try:
                    assert await first.generate(PROMPT, {"max_tokens": 5}).text() == whole
                    break
                except Busy:
                    await asyncio.sleep(0.01)

            async def reads() -> None:
                async for _ in first.generate(PROMPT, {"max_tokens": 200}):
                    pass

            task = asyncio.create_task(reads())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(ask())


def test_errors_are_classes_in_both(pvrd: Restartable) -> None:
    async def ask() -> None:
        async with await AsyncClient.connect(pvrd.address) as client:
            with pytest.raises(InvalidArgument, match="there is no option colour"):
                await client.open_text({"colour": 3})
            session = await client.open_text(TINY)
            await session.close()
            with pytest.raises(NoSuchSession):
                await session.generate(PROMPT).text()
        with pytest.raises(NoDaemon):
            await client.models()
        with pytest.raises(NoDaemon, match=r"There is no daemon to talk to"):
            await AsyncClient.connect(f"unix:path={pvrd.folder}/none")

    asyncio.run(ask())


@pytest.mark.parametrize("depth", [8, 16])
def test_frames_as_arrays(pvrd: Restartable, depth: int) -> None:
    """Both clients enlarge the same frames to the same results, in order."""
    settings = {**FRAME, "depth": depth, "device": "cpu"}
    with Client(pvrd.address) as client, client.open_video(settings) as video:
        found: list[list[np.ndarray]] = []
        for done, planes in video.enlarge(ramp(seq, depth) for seq in range(9)):
            assert done.seq == len(found) + 1
            found.append([plane.copy() for plane in planes])
        assert [plane.shape for plane in found[0]] == [(76, 140), (38, 70), (38, 70)]
        assert found[0][0].dtype == (np.uint8 if depth == 8 else np.uint16)
        with pytest.raises(InvalidArgument, match="planes of a frame"):
            next(video.enlarge([ramp(0, depth)[:2]]))
    # A frame is what it was, but larger.
    small, large = ramp(3, depth)[0].astype(float), found[3][0].astype(float)
    middle = large.reshape(38, 2, 70, 2).mean((1, 3))
    assert np.median(np.abs(middle - small)) < 3 * (1 if depth == 8 else 256)

    async def enlarge() -> None:
        async def frames() -> AsyncIterator[list[np.ndarray]]:
            for seq in range(9):
                await asyncio.sleep(0)
                yield ramp(seq, depth)

        async with (
            await AsyncClient.connect(pvrd.address) as client,
            await client.open_video(settings) as video,
        ):
            at = 0
            async for done, planes in video.enlarge(frames()):
                assert done.seq == at + 1
                for plane, expected in zip(planes, found[at], strict=True):
                    assert np.array_equal(plane, expected)
                at += 1
            assert at == 9
            assert (await video.properties())["Device"] == "cpu"

    asyncio.run(enlarge())


def test_arrays_lie_on_the_ring(pvrd: Restartable) -> None:
    with Client(pvrd.address) as client, client.open_video({**FRAME, "pixel": "nv12"}) as video:
        shapes = [plane.shape for plane in video.arrays(1)]
        assert shapes == [(38, 70), (19, 70)]
        video.arrays(1)[1][3, 5] = 77
        assert video.input(1)[1][3][5] == 77
        assert video.arrays(0)[1][3, 5] == 0


def test_a_restart_is_survived(pvrd: Restartable) -> None:
    """Both clients open their text sessions again, each its own; without `wait` there is none."""
    with Client(pvrd.address, wait=30) as client, Client(pvrd.address) as plain:
        first, second = client.open_text(TINY), client.open_text(TINY)
        whole = blocking_answer(client)
        owner = client.owner()

        async def ask() -> None:
            async with await AsyncClient.connect(pvrd.address, wait=30) as other:
                session = await other.open_text(TINY)
                restarts = other.restarts()
                assert await anext(restarts) == owner
                pvrd.stop()
                with pytest.raises(NoDaemon):
                    await asyncio.to_thread(plain.models)
                asking = asyncio.create_task(session.generate(PROMPT, {"max_tokens": 12}).text())
                await asyncio.to_thread(pvrd.start)
                assert await asking == whole
                assert await anext(restarts) not in ("", owner)
                await restarts.aclose()

        asyncio.run(ask())
        for session in (second, first):
            stream = session.generate(PROMPT, {"max_tokens": 12})
            assert "".join(event.get("text", "") for event in stream) == whole
        assert client.owner() != owner
        assert len({first._path, second._path}) == 2
        second.close()
        assert first.properties()["Error"] == ""


def test_a_video_session_ends_with_its_daemon(pvrd: Restartable) -> None:
    async def enlarge() -> None:
        async def frames() -> AsyncIterator[list[np.ndarray]]:
            seq = 0
            while True:
                yield ramp(seq)
                seq += 1

        async with await AsyncClient.connect(pvrd.address, wait=30) as client:
            async with await client.open_video(FRAME) as video:
                feed = video.enlarge(frames())
                while (await anext(feed))[0].seq < 3:
                    pass
                pvrd.stop(signal.SIGKILL)

                async def rest() -> None:
                    async for _ in feed:
                        pass

                with pytest.raises(PvrdError):
                    await rest()
            await asyncio.to_thread(pvrd.start)
            async with await client.open_video(FRAME) as video:
                async for done, _ in video.enlarge(frames()):
                    assert done.seq == 1
                    break

    try:
        asyncio.run(enlarge())
    finally:
        if not pvrd.running:
            pvrd.start()


def test_no_descriptor_is_left(pvrd: Restartable) -> None:
    def fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def round_trip() -> None:
        async with await AsyncClient.connect(pvrd.address) as client:
            async with await client.open_text(TINY) as session:
                await session.generate(PROMPT, {"max_tokens": 3}).text()
            async with await client.open_video(FRAME):
                pass

    asyncio.run(round_trip())
    before = fds()
    for _ in range(3):
        asyncio.run(round_trip())
    look: Callable[[], bool] = lambda: fds() <= before  # noqa: E731
    until(look, "as few descriptors as before")
