# SPDX-License-Identifier: Apache-2.0
"""The models that a worker holds: pvrd says which; one that is in use stays until it is not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import pvrm
from engine.backends.base import Backend
from engine.errors import PvrError, UnsupportedModel
from engine.importers import convnets
from engine.meanwhile import MEANWHILE
from engine.text import compiled as text_models
from engine.text.model import TextModel
from engine.video import kinds
from pvrd.workers.timings import Meter

PROGRESS_S = 0.1

Send = Callable[[Mapping[str, Any]], None]


class UnknownModel(PvrError):
    """A job names a model that is not loaded."""

    name = "UnknownModel"


@dataclass
class Loaded:
    """A model on the device and how many use it."""

    model: TextModel | kinds.Model
    users: int = 0
    unwanted: bool = False


class Models:
    """Models by key."""

    def __init__(
        self,
        backend: Backend,
        config: Mapping[str, Any],
        send: Send,
        breathe: Callable[[], None],
    ) -> None:
        self.backend = backend
        self.meter: Meter = getattr(backend, "meter", None) or Meter()
        self.config = config
        self._send = send
        self._breathe = breathe
        self._loaded: dict[str, Loaded] = {}

    @contextlib.contextmanager
    def pipelines(self, subject: Mapping[str, str]) -> Iterator[None]:
        """Tells pvrd that pipelines are being made, which may take longer than a slice."""
        MEANWHILE.run()
        self._send({"t": "busy", **subject, "on": True})
        yield
        self._send({"t": "busy", **subject, "on": False})

    def keys(self) -> list[str]:
        """Keys of all that is on the device."""
        return list(self._loaded)

    def load(self, message: Mapping[str, Any], fd: int) -> None:
        """Loads a model, tells the progress, answers pings meanwhile, and says `loaded`.

        `fd` stays the caller's.

        Raises:
            BadModel, UnsupportedModel, OutOfMemory
        """
        key = str(message["model"])
        entry = self._loaded.get(key)
        if entry is None:
            entry = Loaded(self._open(message, fd, _Progress(key, self._send, self._breathe)))
            self._loaded[key] = entry
        entry.unwanted = False
        self._send({"t": "loaded", "model": key, "info": entry.model.info})

    def _open(
        self, message: Mapping[str, Any], fd: int, progress: Callable[[float], None]
    ) -> TextModel | kinds.Model:
        cache, force = str(message.get("cache") or ""), bool(message.get("force"))
        if message.get("kind") == "video":
            return kinds.load(fd, cache, self.backend, progress, force)
        chunk = int(self.config.get("chunk") or 0)
        narrow = bool(message.get("narrow"))
        return TextModel.load(
            fd, cache, self.backend, progress, chunk=chunk, force=force, narrow=narrow
        )

    def inspect(self, fd: int) -> dict[str, Any]:
        """What the file is, as a model.

        Raises:
            BadModel, UnsupportedModel
        """
        if pvrm.is_compiled(fd):
            if pvrm.Pvrm.open(fd).metadata.get("kind") == "video":
                return kinds.inspect(fd)
        elif convnets.kind(fd):
            return kinds.inspect(fd)
        return text_models.inspect(fd)

    def text(self, key: str) -> TextModel:
        """A loaded text model, for a moment.

        Raises:
            UnknownModel, UnsupportedModel
        """
        model = self._entry(key).model
        if not isinstance(model, TextModel):
            raise UnsupportedModel("The model is not for text.")
        return model

    def video(self, key: str) -> kinds.Model:
        """A loaded video model, for a moment.

        Raises:
            UnknownModel, UnsupportedModel
        """
        model = self._entry(key).model
        if isinstance(model, TextModel):
            raise UnsupportedModel("The model is not for video.")
        return model

    def family(self, keys: Sequence[str], precision: str) -> list[kinds.Model]:
        """Loaded video models, for a moment, in a precision.

        Raises:
            UnknownModel, UnsupportedModel, OutOfMemory
            InvalidArgument: there is no such precision.
        """
        return [kinds.precise(self.video(key), precision) for key in keys]

    def acquire(self, key: str) -> None:
        """The model stays loaded until `release`.

        Raises:
            UnknownModel: it is not loaded.
        """
        self._entry(key).users += 1

    def release(self, key: str) -> None:
        """The other half of `acquire`."""
        entry = self._loaded[key]
        entry.users -= 1
        self._drop_unused(key, entry)

    def unload(self, key: str) -> None:
        """Closes a model, at once or when its last user is gone."""
        entry = self._loaded.get(key)
        if entry is not None:
            entry.unwanted = True
            self._drop_unused(key, entry)

    def _entry(self, key: str) -> Loaded:
        entry = self._loaded.get(key)
        if entry is None:
            raise UnknownModel("The model is not loaded.")
        return entry

    def _drop_unused(self, key: str, entry: Loaded) -> None:
        if entry.unwanted and not entry.users:
            del self._loaded[key]
            entry.model.close()


class _Progress:
    """Tells how far a load is, now and then, and answers pings each time."""

    def __init__(self, key: str, send: Send, breathe: Callable[[], None]) -> None:
        self._key = key
        self._send = send
        self._breathe = breathe
        self._last = 0.0

    def __call__(self, value: float) -> None:
        now = time.monotonic()
        if now - self._last >= PROGRESS_S:
            self._last = now
            self._send({"t": "progress", "model": self._key, "value": round(value, 3)})
            self._breathe()
