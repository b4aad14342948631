# SPDX-License-Identifier: Apache-2.0
"""Slices of a worker, kept while somebody traces: a ring, so that a long trace costs no more
memory than a short one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pvrd.workers.timings import Meter, Slice

if TYPE_CHECKING:
    from pvrd.workers.schedule import Task

RING = 65536  # of each: slices, runs of the device, kernels
A_MESSAGE = 250  # events; a message has at most 64 KiB


class Recorder:
    """One trace at a time."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._job = ""
        self._slices: deque[list[Any]] = deque(maxlen=RING)
        self._kernels: deque[list[Any]] = deque(maxlen=RING)

    @property
    def on(self) -> bool:
        """Does anybody trace?"""
        return bool(self._job)

    def begin(self, job: str) -> None:
        """Records from now on, for this trace alone."""
        self._job = job
        self._slices.clear()
        self._kernels.clear()
        self._meter.slices = deque[Slice](maxlen=RING)
        self._meter.kernel = self._kernel

    def _kernel(self, name: str, began: float, seconds: float) -> None:
        self._kernels.append(["kernel", _us(began), _us(seconds), name])

    def slice(self, task: Task, began: float, ended: float) -> None:
        """A task's slice, CLOCK_MONOTONIC seconds."""
        name = "/".join(str(v) for v in task.subject().values())
        kind = type(task).__name__.removesuffix("Task").lower()
        self._slices.append(["slice", _us(began), _us(ended - began), name, kind, task.priority])

    def end(self, job: str) -> Iterator[dict[str, Any]]:
        """Ends a trace: its messages, `trace.done` the last. One that is unknown has none."""
        if job != self._job:
            yield {"t": "trace.done", "job": job}
            return
        events = list(self._slices)
        for began, took, names, size, device in self._meter.slices or ():
            events.append(["run", _us(began), _us(took), names, size, _us(device)])
        events += self._kernels
        self._job, self._meter.slices, self._meter.kernel = "", None, None
        self._slices.clear()
        self._kernels.clear()
        for at in range(0, len(events), A_MESSAGE):
            yield {"t": "trace", "job": job, "events": events[at : at + A_MESSAGE]}
        yield {"t": "trace.done", "job": job}


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
