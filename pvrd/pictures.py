# SPDX-License-Identifier: Apache-2.0
"""Upscale: one picture, copied from the caller, enlarged by a worker into a memfd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pvrd import fds
from pvrd.bus import Variant
from pvrd.bus_values import V
from pvrd.core import Core, report
from pvrd.errors import BadModel, Cancelled, PvrdError, ShuttingDown, Timeout
from pvrd.jobs import Job
from pvrd.models import Model
from pvrd.objects import METHOD_S, Answer
from pvrd.stream import Last, LineStream, failure
from pvrd.worker import Worker

_TYPES = {
    "width": "u", "height": "u", "bytes": "t", "format": "s", "device": "s", "restarts": "u",
    "tiles": "u", "tiles_cpu": "u", "tiles_fallback": "u", "tile_map": "s", "ms": "d",
    "precision": "s",
}  # fmt: skip
PICTURE_FDS = 3  # the picture's, the result's and a pipe's
MAP_CHARS = 3072


class PictureJob:
    """One picture. Owns its source, its result and, with `stream`, its progress pipe."""

    def __init__(self, core: Core, uid: int, models: Sequence[Model], chosen: Any) -> None:
        """models: of one family (pvrd/enlarge.py)."""
        self._core = core
        self._uid = uid
        self._models = models
        self._chosen = chosen
        self.id = f"j{core.next_number()}"
        self._restarts = 0
        self._source = fds.memfd("pvrd-picture")
        try:
            self._result = fds.memfd("pvrd-result")
        except PvrdError:
            os.close(self._source)
            raise
        self._charge = 0
        self._stream: LineStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped: PvrdError | None = None

    def close(self) -> None:
        """Lets go of everything."""
        for fd in (self._source, self._result):
            if fd >= 0:
                os.close(fd)
        self._source = self._result = -1
        self._core.peers.give(self._uid, size=self._charge)
        self._charge = 0
        if self._stream is not None:
            self._stream.close()

    async def take(self, fd: int) -> None:
        """Copies the caller's picture; `fd` becomes ours.

        Raises:
            InvalidArgument, QuotaExceeded, Timeout: see pvrd/fds.py and the caller's quota.
        """
        try:
            limit = self._core.config.whole("limits.bytes")
            size, _ = await fds.looked_at(fd, "the picture", limit, self._uid)
            target = os.dup(self._source)
        except BaseException:
            os.close(fd)
            raise
        try:
            self._core.peers.take(self._uid, size=size)
        except BaseException:
            os.close(fd)
            os.close(target)
            raise
        self._charge = size
        stop = threading.Event()

        loop = asyncio.get_running_loop()
        counted = contextlib.ExitStack()
        counted.enter_context(self._core.peers.job(self._uid, 2))

        def work() -> None:
            # Both fds belong to this thread, and it counts as a job of the caller's: the call may
            # end long before a file on a file system that hangs does.
            try:
                fds.copy(fd, target, size, lambda _: None, stop)
            finally:
                os.close(fd)
                os.close(target)
                with contextlib.suppress(RuntimeError):  # the loop may have ended
                    loop.call_soon_threadsafe(counted.close)

        try:
            await fds.in_thread(work)
        finally:
            stop.set()
        fds.seal(self._source, fds.SEAL_SHRINK | fds.SEAL_GROW | fds.SEAL_WRITE)

    async def now(self) -> Answer:
        """Does it and answers, within the time of a method."""
        try:
            async with asyncio.timeout(METHOD_S - 1):
                info = await self._work(lambda done, total: None)
        except TimeoutError:
            text = f"the picture takes longer than {METHOD_S:g} s; ask with stream: true"
            raise Timeout(text) from None
        return Answer([0, _typed(info)], [fds.read_only(self._result)])

    def later(self) -> Answer:
        """Answers with the progress pipe and goes on; then the job closes itself."""
        slow_s = self._core.config.number("limits.slow_reader_s")
        self._stream = LineStream(slow_s, lambda: self.stop(Cancelled("the reader went away")))
        result = fds.read_only(self._result)
        reader, self._stream.reader = self._stream.reader, -1
        self._task = self._core.task(self._follow(self._stream))
        return Answer([0, {"result": V("h", 1)}], [reader, result])

    def stop(self, error: PvrdError) -> None:
        """Ends a job that streams."""
        if self._task is not None and not self._task.done() and self._stopped is None:
            self._stopped = error
            self._task.cancel()

    async def _follow(self, stream: LineStream) -> None:
        last: Last
        try:
            try:
                info = await self._work(
                    lambda done, total: stream.write_if_room(
                        "progress", {"done": done, "total": total}
                    )
                )
                last = ("end", info)
            except asyncio.CancelledError:
                last = failure(self._stopped or ShuttingDown("pvrd is ending"))
            except Exception as e:
                last = failure(report(e))
            await stream.finish(last)
        finally:
            self.close()

    async def _work(self, progress: Any) -> dict[str, Any]:
        core = self._core
        began = time.monotonic()

        def moved(_: str) -> None:
            self._restarts += 1

        async def enlarge(worker: Worker) -> dict[str, Any]:
            for model in self._models[1:]:
                await core.supervisor.load(worker, model)
            os.ftruncate(self._result, 0)
            ended = False
            with worker.route("job", self.id) as inbox:
                settings = {
                    "models": [model.key for model in self._models],
                    "width": self._chosen["out_width"], "height": self._chosen["out_height"],
                    "map": self._chosen["tile_map"],
                    **{
                        key: self._chosen[key]
                        for key in ("scale", "format", "priority", "share", "tile", "precision")
                    },
                }  # fmt: skip
                message: dict[str, Any] = {"t": "picture", "job": self.id, "settings": settings}
                worker.counters.jobs += 1
                worker.send(message, [self._source, self._result])
                try:
                    while True:
                        message = await inbox.get()
                        if message["t"] == "picture.progress":
                            progress(int(message.get("done", 0)), int(message.get("total", 0)))
                        elif message["t"] == "picture.done":
                            ended = True
                            return self._info(message, worker)
                finally:
                    if not ended:
                        worker.send({"t": "cancel", "job": self.id})

        for model in self._models:
            core.supervisor.use(model)
        try:
            chosen = self._chosen
            listed = Job(self.id, "picture", self._models[0].name, self._uid, chosen["priority"],
                         chosen["share"])  # fmt: skip
            with core.peers.job(self._uid, PICTURE_FDS), core.jobs.of(listed):
                info = await core.supervisor.attempt(
                    self._chosen["device"],
                    self._models[0],
                    self._chosen["priority"],
                    enlarge,
                    moved,
                    listed,
                )
        except asyncio.CancelledError:
            core.stats.jobs_cancelled += 1
            raise
        except Exception:
            core.stats.jobs_failed += 1
            raise
        finally:
            for model in self._models:
                core.supervisor.release(model)
        fds.seal(self._result, fds.SEAL_SHRINK | fds.SEAL_GROW)
        fds.seal(self._result, fds.SEAL_WRITE)  # refused while the worker still maps it
        core.stats.jobs_done += 1
        core.stats.pictures += 1
        core.stats.tiles += info["tiles"]
        core.stats.tiles_fallback += info["tiles_fallback"]
        core.stats.tiles_cpu += info["tiles_cpu"]
        return {**info, "ms": (time.monotonic() - began) * 1000}

    def _info(self, message: Mapping[str, Any], worker: Worker) -> dict[str, Any]:
        size = os.fstat(self._result).st_size
        if not size:
            raise BadModel("the worker wrote no picture")
        stats = message.get("stats")
        stats = stats if isinstance(stats, dict) else {}
        info = {
            "width": int(message.get("width", 0)), "height": int(message.get("height", 0)),
            "bytes": size, "format": str(message.get("format", ""))[:16], "device": worker.kind,
            "restarts": self._restarts, "tiles": int(stats.get("tiles", 0)),
            "tiles_cpu": int(stats.get("tiles_cpu", 0)),
            "tiles_fallback": int(stats.get("tiles_fallback", 0)),
        }  # fmt: skip
        info["precision"] = str(message.get("precision", ""))[:16]
        if self._chosen["tile_map"]:
            info["tile_map"] = str(message.get("map", ""))[:MAP_CHARS]
        return info


def _typed(info: Mapping[str, Any]) -> dict[str, Variant]:
    return {key: V(kind, info[key]) for key, kind in _TYPES.items() if key in info}
