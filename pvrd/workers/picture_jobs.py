# SPDX-License-Identifier: Apache-2.0
"""Pictures: read from one memfd, enlarged tile by tile, written to another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from engine.backends.selftest import Quarantined
from engine.errors import OutOfMemory
from engine.video.picture import PictureJob
from pvrd.workers import devices, protocol
from pvrd.workers.models import Models
from pvrd.workers.timings import Spans
from pvrd.workers.video_jobs import tile_map

DEFAULT_PRIORITY = 5
MAX_SOURCE = 1 << 30
PROGRESS_S = 0.1

Send = Callable[[Mapping[str, Any]], None]


class PictureTask:
    """One picture, from its file to the enlarged file."""

    def __init__(
        self, models: Models, message: Mapping[str, Any], source: int, result: int, send: Send
    ) -> None:
        """Both fds stay the caller's; `source` is read with pread and never mapped.

        Raises:
            InvalidArgument: no picture, or settings that make no sense.
            UnknownModel, UnsupportedModel, OutOfMemory
        """
        self.job = str(message["job"])
        settings = message["settings"]
        self.priority = int(settings.get("priority", DEFAULT_PRIORITY))
        self.share = int(settings.get("share") or 0)
        self.account = self.job
        self.spans = Spans(models.meter)
        self._keys = [str(key) for key in settings["models"]]
        self._mapped = bool(settings.get("map"))
        self._models = models
        self._send = send
        self._began = self._told = time.monotonic()
        data = protocol.read_all(source, MAX_SOURCE)
        tile = settings.get("tile") or models.config.get("tile") or 0
        family = models.family(self._keys, str(settings.get("precision") or "f32"))
        self._precision = str(family[0].info["format"])
        self._picture = PictureJob(models.backend, family, data, {**settings, "tile": tile})
        self._result = os.dup(result)
        for key in self._keys:
            models.acquire(key)

    def subject(self) -> Mapping[str, str]:
        return {"job": self.job}

    def deadline(self) -> int | None:
        return None

    def ready(self) -> bool:
        return True

    def step(self) -> bool:
        """One slice; False after `picture.done`.

        Raises:
            InvalidArgument: a damaged picture.
            DeviceLost, OutOfMemory
            Quarantined: a kernel that the picture is made with turned out to be wrong.
        """
        executable = self._picture.executable
        if executable is not None and (found := devices.doubt(self._models.backend, executable)):
            raise Quarantined("The picture's kernel {} is not used any more ({}).".format(*found))
        if self._picture.progress[1]:
            finished = self._picture.step()
        else:  # one of the first slices makes the pipelines
            with self._models.pipelines(self.subject()):
                finished = self._picture.step()
        if not finished:
            self._progress()
            return True
        self._write()
        info = self._picture.info
        self.spans.take()
        message: dict[str, Any] = {
            "t": "picture.done",
            "job": self.job,
            **{k: info[k] for k in ("width", "height", "bytes", "format")},
            "precision": self._precision,
            "stats": {
                **{k: info[k] for k in ("tiles", "tiles_cpu", "tiles_fallback")},
                "ms": round((time.monotonic() - self._began) * 1000, 3),
                **self.spans.sums(),
            },
        }
        if self._mapped:
            message["map"] = tile_map(self._picture.made_by, self._picture.tile_size)
        self._send(message)
        return False

    def close(self) -> None:
        self._picture.close()
        os.close(self._result)
        for key in self._keys:
            self._models.release(key)

    def _progress(self) -> None:
        now = time.monotonic()
        done, total = self._picture.progress
        if total and now - self._told >= PROGRESS_S:
            self._told = now
            self._send({"t": "picture.progress", "job": self.job, "done": done, "total": total})

    def _write(self) -> None:
        offset = 0
        os.ftruncate(self._result, 0)
        try:
            for part in self._picture.parts:
                view = memoryview(part)
                while view:
                    written = os.pwrite(self._result, view, offset)
                    view, offset = view[written:], offset + written
        except OSError as e:
            raise OutOfMemory(
                f"The picture of {self._picture.nbytes} bytes has no room: {e.strerror}."
            ) from None
