# SPDX-License-Identifier: Apache-2.0
"""AddModel: a file is copied into the store, looked at by a worker, and described."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any

from pvrd.bus import Variant
from pvrd.bus_values import V, plain, variant
from pvrd.core import Core, report
from pvrd.errors import BadModel, Cancelled, ShuttingDown
from pvrd.inbox import WorkerLost
from pvrd.objects import Answer
from pvrd.stream import Last, LineStream, failure
from pvrd.supervisor import MAX_KILLS

MODEL_FDS = 3  # the caller's, a copy's and a pipe's


async def add(core: Core, fd: int, uid: int, name: str, chosen: dict[str, Any]) -> Answer:
    """Adds the file of `fd`, which is ours now; with the option `stream` the answer comes at once.

    Raises:
        PvrdError: as ModelStore.add.
    """
    if not chosen["stream"]:
        try:
            details = await _add(core, fd, uid, name, chosen, lambda done, total: None)
        finally:
            os.close(fd)
        return Answer([_added(details)])
    try:
        task: asyncio.Task[None] | None = None
        slow_s = core.config.number("limits.slow_reader_s")

        def gone() -> None:
            if task is not None:
                task.cancel()

        stream = LineStream(slow_s, gone)
    except BaseException:
        os.close(fd)
        raise
    reader, stream.reader = stream.reader, -1
    task = core.task(_add_streaming(core, fd, uid, name, chosen, stream))
    return Answer([{"progress": V("h", 0)}], [reader])


async def _add_streaming(
    core: Core, fd: int, uid: int, name: str, chosen: dict[str, Any], stream: LineStream
) -> None:
    loop = asyncio.get_running_loop()
    last: Last

    def progress(done: int, total: int) -> None:
        loop.call_soon_threadsafe(stream.write_if_room, "progress", {"done": done, "total": total})

    try:
        try:
            details = await _add(core, fd, uid, name, chosen, progress)
            last = ("end", plain(_added(details)))
        except asyncio.CancelledError:
            gone = Cancelled("the reader went away")
            last = failure(ShuttingDown("pvrd is ending") if core.closing else gone)
        except Exception as e:
            last = failure(report(e))
        await stream.finish(last)
    finally:
        stream.close()
        os.close(fd)


async def _add(
    core: Core, fd: int, uid: int, name: str, chosen: dict[str, Any],
    progress: Callable[[int, int], None],
) -> dict[str, Any]:  # fmt: skip
    async def inspect(target: int) -> dict[str, Any]:
        job = f"j{core.next_number()}"
        for _ in range(MAX_KILLS):
            worker = await core.supervisor.choose("cpu")
            try:
                with worker.route("job", job) as inbox:
                    worker.send({"t": "inspect", "job": job}, [target])
                    info = (await inbox.expect("inspected")).get("info")
                return info if isinstance(info, dict) else {}
            except WorkerLost:
                continue
        raise BadModel(f"{MAX_KILLS} workers ended while they looked at the file")

    with core.peers.job(uid, MODEL_FDS):
        return await core.store.add(fd, name, chosen, inspect, progress, uid)


def _added(details: Mapping[str, Any]) -> dict[str, Variant]:
    return {
        key: V("t", details[key]) if key == "size" else variant(str(details[key]))
        for key in ("name", "kind", "size", "sha256", "arch")
    }
