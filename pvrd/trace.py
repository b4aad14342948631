# SPDX-License-Identifier: Apache-2.0
"""A trace of some seconds: the workers' slices and runs, and the jobs, as JSON in the Trace Event
Format that Perfetto and Chrome read. Times are CLOCK_MONOTONIC. No prompt and no answer is in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from pvrd.core import Core
from pvrd.jobs import Job
from pvrd.worker import Worker, WorkerLost

MOST_S = 600.0
ANSWER_S = 15.0  # of a worker that is asked for what it recorded
MOST_EVENTS = 400_000

# Tracks of a worker's process.
SLICES, RUNS, DEVICE, KERNELS = 1, 2, 3, 4
_TRACKS = {
    SLICES: "slices", RUNS: "submit to done", DEVICE: "device's clock", KERNELS: "kernels",
}  # fmt: skip

Event = dict[str, Any]


async def record(core: Core, seconds: float) -> bytes:
    """Traces for so long; the file's bytes. A worker that ends meanwhile is missing, and named."""
    ended = core.jobs.ended = []
    began = time.monotonic()
    try:
        found = await asyncio.gather(
            *(_worker(core, worker, seconds) for worker in core.supervisor.workers)
        )
        if not any(worker.state == "ready" for worker in core.supervisor.workers):
            await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
    finally:
        core.jobs.ended = None
    events: list[Event] = _process(os.getpid(), "pvrd", {1: "jobs"})
    for worker, pid, raw in found:
        if pid:
            events += _process(pid, f"pvrd-worker {worker.kind}", _TRACKS)
            events += worker_events(pid, raw)
    events += job_events([*ended, *core.jobs.running.values()], began, time.monotonic())
    lost = [worker.kind for worker, pid, raw in found if pid and raw is None]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"lost": lost}}
    return json.dumps(trace, separators=(",", ":")).encode()


async def _worker(
    core: Core, worker: Worker, seconds: float
) -> tuple[Worker, int, list[Any] | None]:
    job = f"t{core.next_number()}"
    pid, events = worker.pid, list[Any]()
    try:
        with worker.route("job", job) as inbox:
            worker.send({"t": "trace", "job": job, "on": True})
            try:
                async with asyncio.timeout(seconds):
                    await inbox.get()  # nothing comes but the worker's end
            except TimeoutError:
                pass
            finally:
                worker.send({"t": "trace", "job": job, "on": False})
            async with asyncio.timeout(ANSWER_S):
                while (message := await inbox.get())["t"] != "trace.done":
                    if isinstance(message.get("events"), list) and len(events) < MOST_EVENTS:
                        events += message["events"]
        return worker, pid, events
    except (WorkerLost, TimeoutError):
        return worker, pid, None


def _process(pid: int, name: str, tracks: dict[int, str]) -> list[Event]:
    out: list[Event] = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}]
    for track, title in tracks.items():
        out.append(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": title}}
        )
    return out


def worker_events(pid: int, raw: Sequence[Any] | None) -> list[Event]:
    """What a worker recorded, as trace events; what is malformed is left out."""
    out: list[Event] = []
    for event in raw or ():
        try:
            what, begun, took, name, *rest = event
            base: Event = {"ph": "X", "pid": pid, "ts": int(begun), "dur": int(took)}
            base["name"] = str(name)[:200]
            if what == "slice":
                args = {"kind": str(rest[0])[:40], "priority": int(rest[1])}
                out.append({**base, "tid": SLICES, "cat": "slice", "args": args})
            elif what == "run":
                args = {"size": int(rest[0]), "device_us": int(rest[1])}
                out.append({**base, "tid": RUNS, "cat": "run", "args": args})
                if args["device_us"]:
                    # When within the run is not known: it is drawn at its end.
                    at = base["ts"] + max(0, base["dur"] - args["device_us"])
                    clock = {**base, "ts": at, "dur": args["device_us"]}
                    out.append({**clock, "tid": DEVICE, "cat": "device"})
            elif what == "kernel":
                out.append({**base, "tid": KERNELS, "cat": "kernel"})
        except (TypeError, ValueError, IndexError):
            continue
    return out


def job_events(jobs: Iterable[Job], began: float, now: float) -> list[Event]:
    """A bar for each job, and one in it for the time that it had a place."""
    out: list[Event] = []
    for job in jobs:
        end = job.ended or now
        base: Event = {"pid": os.getpid(), "tid": 1, "cat": "job", "id": job.id}
        args = {"model": job.model, "device": job.device, "priority": job.priority,
                "share": job.share, "session": job.session, "tokens": job.tokens()}  # fmt: skip
        spans = [(f"{job.kind} {job.id}", job.began, args)]
        if job.ran:
            spans.append(("running", job.ran, {}))
        for name, start, more in spans:
            first = max(start, began)
            out.append({**base, "ph": "b", "name": name, "ts": _us(first), "args": more})
            out.append({**base, "ph": "e", "name": name, "ts": _us(max(first, end))})
    return out


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
