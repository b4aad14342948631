# SPDX-License-Identifier: Apache-2.0
"""The models in one worker's memory, and those on their way there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pvrd.errors import PvrdError, from_name, shortage
from pvrd.inbox import WorkerLost
from pvrd.models import COMPILED, Model


class Send(Protocol):
    """Worker.send: the copies that it makes of the fds are closed in the lane."""

    def __call__(self, message: Mapping[str, Any], fds: Sequence[int], lane: str) -> None: ...


@dataclass
class Loading:
    """A model in a worker."""

    model: Model
    future: asyncio.Future[dict[str, Any]]
    progress: float = 0.0
    task: asyncio.Task[None] | None = None  # hands the file over


class Loadings(dict[str, Loading]):
    """By the models' keys."""

    @property
    def under_way(self) -> bool:
        """Is the worker loading one?"""
        return any(not loading.future.done() for loading in self.values())

    def begin(self, model: Model, cache: str, send: Send) -> Loading:
        """Has the worker load a model; `cache` is the folder for what it compiles.

        The future gets UnknownModel, OutOfMemory or Timeout when the file cannot be handed over.
        """
        loop = asyncio.get_running_loop()
        loading = self[model.key] = Loading(model, loop.create_future())
        loading.task = loop.create_task(self._hand_over(loading, cache, send))
        return loading

    async def _hand_over(self, loading: Loading, cache: str, send: Send) -> None:
        model = loading.model
        try:
            async with model.opened() as fd:
                if not loading.future.done():  # else the worker is gone
                    _send(model, fd, cache, send)
        except (OSError, PvrdError) as error:
            if self.get(model.key) is loading:
                del self[model.key]  # or the next one would wait for it
            if not loading.future.done():
                known = error if isinstance(error, PvrdError) else shortage(error)
                _fail(loading, known or error)

    def told(self, message: Mapping[str, Any]) -> None:
        """The worker says how far it is (progress), what it has (loaded), or why not (error)."""
        key = str(message.get("model"))
        loading = self.get(key)
        if message["t"] == "error":
            self.pop(key, None)
        if loading is None or loading.future.done():
            return
        if message["t"] == "loaded":
            loading.progress = 1.0
            info = message.get("info")
            loading.future.set_result(info if isinstance(info, dict) else {})
        elif message["t"] == "error":
            _fail(loading, from_name(message.get("error"), message.get("message", "")))
        else:
            with contextlib.suppress(TypeError, ValueError):
                loading.progress = min(1.0, max(0.0, float(message.get("value", 0.0))))

    def lose(self, lost: WorkerLost) -> None:
        """The worker is gone, and so are they."""
        for loading in self.values():
            if not loading.future.done():
                _fail(loading, lost)
        self.clear()


def _fail(loading: Loading, error: Exception) -> None:
    loading.future.set_exception(error)
    loading.future.exception()  # nobody may be waiting


def _send(model: Model, fd: int, cache: str, send: Send) -> None:
    compiled = model.path.suffix == COMPILED
    send(
        {
            "t": "load", "model": model.key, "name": model.name, "kind": model.kind,
            "cache": "" if compiled else f"{cache}/{model.key}{COMPILED}",
            "force": False, "narrow": model.narrow,
        },
        [fd],
        model.lane,
    )  # fmt: skip
