# SPDX-License-Identifier: Apache-2.0
"""Jobs that are under way, for ListJobs and for traces: what they are, where, how far."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pvrd.bus import Variant
from pvrd.bus_values import V

if TYPE_CHECKING:
    from pvrd.core import Core, Session
    from pvrd.supervisor import Supervisor

MOST_ENDED = 10_000  # of a trace


def _zero() -> int:
    return 0


@dataclass(eq=False)
class Job:
    """One job. `state`: choosing a worker, waiting, loading, running."""

    id: str
    kind: str  # text, embed, classify, count, picture
    model: str
    uid: int
    priority: int
    share: int = 0
    session: str = ""  # the object's path
    device: str = ""
    state: str = "choosing"
    ticket: int = 0  # its number among those that wait, 0: it does not
    tokens: Callable[[], int] = _zero  # so far
    began: float = field(default_factory=time.monotonic)
    ran: float = 0.0  # since when it has a place
    ended: float = 0.0

    def at(self, state: str, device: str, ticket: int = 0) -> None:
        """What happens to it now."""
        self.state, self.device, self.ticket = state, device, ticket
        if state == "running":
            self.ran = time.monotonic()


class Jobs:
    """All jobs under way."""

    def __init__(self) -> None:
        self.running: dict[str, Job] = {}
        self.ended: list[Job] | None = None  # while somebody traces

    @contextlib.contextmanager
    def of(self, job: Job) -> Iterator[Job]:
        """Lists a job while the block runs."""
        self.running[job.id] = job
        try:
            yield job
        finally:
            self.running.pop(job.id, None)
            job.ended = time.monotonic()
            if self.ended is not None and len(self.ended) < MOST_ENDED:
                self.ended.append(job)

    def shares(self) -> int:
        """Percent that jobs without a session are guaranteed."""
        return sum(job.share for job in self.running.values() if not job.session)


def listing(core: Core, uid: int | None) -> list[dict[str, Variant]]:
    """What ListJobs answers: the jobs of a UID (None: of all) and the sessions that have none."""
    now = time.monotonic()
    jobs = [j for j in core.jobs.running.values() if uid in (None, j.uid)]
    out = [_job(job, core.supervisor, now) for job in jobs]
    busy = {job.session for job in jobs}
    for session in core.sessions.values():
        if uid in (None, session.uid) and session.path not in busy:
            out.append(_session(session, now))
    return out


def _job(job: Job, supervisor: Supervisor, now: float) -> dict[str, Variant]:
    position = supervisor.places.position(job.device, job.ticket) if job.ticket else 0
    return _typed(
        session=job.session, job=job.id, kind=job.kind, model=job.model, device=job.device,
        priority=job.priority, share=job.share, state=job.state, position=position,
        tokens=job.tokens(), frames=0, seconds=now - job.began,
        running_s=now - job.ran if job.ran else 0.0, uid=job.uid,
    )  # fmt: skip


def _session(session: Session, now: float) -> dict[str, Variant]:
    video = hasattr(session, "done_count")
    values = session.values()
    ready, error = bool(values["Ready"].value), str(values["Error"].value)
    state = "failed" if error else "loading" if not ready else "idle"
    if video and ready and not error:
        line = getattr(session, "_line", None)
        state = "paused" if values["Paused"].value else "running" if line and line.frames else state
    return _typed(
        session=session.path, job="", kind="video" if video else "text",
        model=session.model.name, device=str(values["Device"].value),
        priority=session.priority, share=session.share, state=state, position=0, tokens=0,
        frames=int(getattr(session, "done_count", 0)), seconds=now - session.opened,
        running_s=0.0, uid=session.uid,
    )  # fmt: skip


_TYPES = {
    "session": "s", "job": "s", "kind": "s", "model": "s", "device": "s", "priority": "u",
    "share": "u", "state": "s", "position": "u", "tokens": "t", "frames": "t", "seconds": "d",
    "running_s": "d", "uid": "u",
}  # fmt: skip


def _typed(**values: Any) -> dict[str, Variant]:
    return {key: V(_TYPES[key], value) for key, value in values.items()}
