# SPDX-License-Identifier: Apache-2.0
"""Questions about texts that have one answer: vectors, and which label fits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from engine.backends.selftest import Quarantined
from engine.errors import InvalidArgument, OutOfMemory
from engine.text.classify import Classification
from engine.text.embed import Embedding
from engine.text.model import State
from pvrd.workers import devices, protocol
from pvrd.workers.models import Models
from pvrd.workers.timings import Spans

DEFAULT_PRIORITY = 5
MAX_REQUEST = 16 << 20

Send = Callable[[Mapping[str, Any]], None]


class QueryTask:
    """One question, from its memfd to `query.done`. It has a KV state of its own while it runs."""

    def __init__(
        self, models: Models, message: Mapping[str, Any], request: int, result: int, send: Send
    ) -> None:
        """Both fds stay the caller's.

        Raises:
            InvalidArgument: a damaged request.
            UnknownModel, UnsupportedModel
        """
        self.job = str(message["job"])
        self.priority = int(message.get("priority", DEFAULT_PRIORITY))
        self.share = int(message.get("share") or 0)
        self.account = str(message.get("session") or self.job)
        self.spans = Spans(models.meter)
        self._context = int(message.get("context") or 0)
        self._kind = str(message["kind"])
        self._model = str(message["model"])
        self._models = models
        self._send = send
        try:
            self._asked = json.loads(protocol.read_all(request, MAX_REQUEST))
        except ValueError:
            raise InvalidArgument("The question is damaged.") from None
        if self._kind not in ("embed", "classify") or not isinstance(self._asked, dict):
            raise InvalidArgument(f"There is no question of the kind {self._kind[:32]!r}.")
        self._state: State | None = None
        self._work: Embedding | Classification | None = None
        models.text(self._model)
        self._result = os.dup(result)
        models.acquire(self._model)

    def subject(self) -> Mapping[str, str]:
        return {"job": self.job}

    def deadline(self) -> int | None:
        return None

    def ready(self) -> bool:
        return True

    def step(self) -> bool:
        """One slice; False after `query.done`.

        Raises:
            InvalidArgument, ContextFull, OutOfMemory, DeviceLost
            Quarantined: a kernel that it is computed with turned out to be wrong.
        """
        if self._work is None:
            with self._models.pipelines(self.subject()):
                self._work = self._begin()
        assert self._state is not None
        found = devices.doubt(self._models.backend, self._state.executable)
        if found is not None:
            raise Quarantined("The kernel {} is not used any more ({}).".format(*found))
        if self._work.step():
            return True
        if isinstance(self._work, Embedding):
            data = self._work.result.astype("<f4").tobytes()
            answer: dict[str, Any] = {"width": self._work.result.shape[1]}
        else:
            data = json.dumps(self._work.scores).encode()
            answer = {"best": self._work.best}
        try:
            protocol.write_all(self._result, data)
        except OSError as e:
            raise OutOfMemory(f"The answer of {len(data)} bytes has no room: {e}.") from None
        self.spans.take()
        told = {"bytes": len(data), "tokens": self._work.tokens, **answer}
        told["stats"] = self.spans.sums()
        self._send({"t": "query.done", "job": self.job, **told})
        return False

    def _begin(self) -> Embedding | Classification:
        model = self._models.text(self._model)
        asked = self._asked
        most = int(model.info["context"])
        self._state = model.state(min(self._context, most) if self._context else 0)
        if self._kind == "embed":
            return Embedding(self._state, asked["texts"], asked.get("pooling", "mean"))
        return Classification(
            self._state,
            asked["text"],
            asked["labels"],
            asked.get("question", ""),
            asked.get("calibrate", True),
        )

    def close(self) -> None:
        if self._state is not None:
            self._state.close()
        os.close(self._result)
        self._models.release(self._model)
