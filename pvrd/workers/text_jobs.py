# SPDX-License-Identifier: Apache-2.0
"""Text jobs: the journal is read, the prompt prefilled, the answer sent token by token.

A job belongs to a session; the session keeps its KV state from job to job and runs one job at a time, in the
order of arrival. A job of a predecessor goes on where pvrd's record ends: its ids are replayed, not sent again.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from engine.errors import InvalidArgument
from engine.text.generate import Generation
from pvrd.workers import protocol
from pvrd.workers.models import Models
from pvrd.workers.schedule import Scheduler, Task

DEFAULT_PRIORITY = 5
Send = Callable[[Mapping[str, Any]], None]


@dataclass
class Session:
    """A session's KV state (made by its first job) and its jobs, the first of which runs."""

    name: str
    model: str = ""
    context: int = 0
    state: Any = None
    jobs: deque[TextTask] = field(default_factory=deque)

    def forget(self) -> None:
        """Gives the KV memory back."""
        if self.state is not None:
            self.state.close()
            self.state = None


class TextTask:
    """One job, from its journal to its `text.end`."""

    def __init__(self, models: Models, session: Session, message: Mapping[str, Any], journal: int,
                 send: Send) -> None:
        self.job = str(message["job"])
        self.model = str(message["model"])
        self._models = models
        self._session = session
        self._send = send
        self._header, self._ids = read_journal(journal, int(message.get("delivered", 0)))
        self._settings = {**self._header.get("settings", {}), **message.get("settings", {})}
        self.priority = int(self._settings.get("priority", DEFAULT_PRIORITY))
        self._next = len(self._ids)
        self._acked = self._next
        self._generation: Generation | None = None

    def subject(self) -> Mapping[str, str]:
        return {"job": self.job}

    def deadline(self) -> int | None:
        return None

    def ready(self) -> bool:
        """It is this job's turn in its session and pvrd keeps up."""
        return self._session.jobs[0] is self and self._next - self._acked < protocol.MAX_AHEAD

    def ack(self, n: int) -> None:
        """pvrd has forwarded the first n tokens of the job."""
        self._acked = max(self._acked, n)


def read_journal(fd: int, delivered: int) -> tuple[dict[str, Any], list[int]]:
    """The header of a job and the ids of its first `delivered` tokens.

    Raises:
        InvalidArgument: no journal, or a shorter one.
    """
    try:
        raw = protocol.read_all(fd)
        line, newline, _ = raw.partition(b"\n")
        header = json.loads(line)
        start = -(-(len(line) + 1) // protocol.JOURNAL_ALIGN) * protocol.JOURNAL_ALIGN
        ids = np.frombuffer(raw, "<i4", delivered, start) if delivered else np.empty(0, "<i4")
    except (ValueError, protocol.ProtocolError):
        raise InvalidArgument("The journal of the job is damaged.") from None
    if not newline or not isinstance(header, dict):
        raise InvalidArgument("The journal of the job is damaged.")
    return cast(dict[str, Any], header), [int(i) for i in ids]
