# SPDX-License-Identifier: Apache-2.0
"""A text session in a worker: its caches and recordings, made before its first prompt comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.errors import DeviceLost, PvrError
from engine.text.batch import Batches
from engine.text.model import State, TextModel
from pvrd.workers import devices
from pvrd.workers.models import Models
from pvrd.workers.schedule import Scheduler
from pvrd.workers.timings import Spans

if TYPE_CHECKING:
    from pvrd.workers.text_jobs import TextTask

DEFAULT_PRIORITY = 5


class Session:
    """A session: its KV state, made ahead or by its first job, and its jobs; the first one runs."""

    def __init__(self, models: Models, batches: Batches) -> None:
        self._batches = batches
        self.jobs: deque[TextTask] = deque()
        self.model = ""
        self.begun = False  # it had a job
        self.closing = False
        self._models = models
        self._asked = (0, "")
        self._state: State | None = None

    def state(self, model: str, context: int, kv: str = "f16") -> State:
        """The state for this model and context (0: a default; at most what the model can do), with
        caches of the form `kv`.

        Raises:
            UnknownModel, UnsupportedModel, OutOfMemory
        """
        stale = self._state is None or self.doubt() is not None
        if stale or (self.model, self._asked) != (model, (context, kv)):
            self.forget()
            loaded: TextModel = self._models.text(model)
            self._state = loaded.state(min(context, int(loaded.info["context"])), kv)
            self._models.acquire(model)
            self.model, self._asked = model, (context, kv)
        assert self._state is not None
        return self._state

    def doubt(self) -> tuple[str, str] | None:
        """A kernel, and why, that may have made the state wrong."""
        if self._state is None:
            return None
        return devices.doubt(self._models.backend, self._state.executable)

    @property
    def kept(self) -> bool:
        """Has it a state?"""
        return self._state is not None

    def forget(self) -> None:
        """Gives the KV memory back."""
        if self._state is not None:
            self._batches.drop(self._state)
            self._state.close()
            self._state = None
            self._models.release(self.model)


class ReadyTask:
    """One slice, while the worker has no other tasks. What goes wrong is for the first prompt to
    say.
    """

    def __init__(
        self, models: Models, scheduler: Scheduler, session: Session, message: Mapping[str, Any]
    ) -> None:
        self.session = session
        self.priority = int(message.get("priority", DEFAULT_PRIORITY))
        self._scheduler = scheduler
        self.spans = Spans(models.meter)
        self._models = models
        self._name, self._model = str(message["session"]), str(message["model"])
        self._context, self._kv = int(message.get("context") or 0), message.get("kv")

    def subject(self) -> Mapping[str, str]:
        return {"session": self._name}

    def deadline(self) -> int | None:
        return None

    def ready(self) -> bool:
        return all(isinstance(task, ReadyTask) for task in self._scheduler.tasks())

    def step(self) -> bool:
        """Makes them, unless a prompt came first or the session is closed.

        Raises:
            DeviceLost
        """
        if not self.session.begun and not self.session.closing:
            with self._models.pipelines(self.subject()):
                try:
                    self.session.state(self._model, self._context, str(self._kv or "f16"))
                except DeviceLost:
                    raise
                except PvrError:
                    self.session.forget()
        return False

    def close(self) -> None:
        """It holds nothing: what it made is the session's."""
