# SPDX-License-Identifier: Apache-2.0
"""ListJobs and Trace, and shares on their way to the worker."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pvrd.bus_values import plain
from pvrd.governor import Decision
from pvrd.jobs import Job, Jobs
from pvrd.supervisor import CPU_SLICE_MS, orders
from pvrd.trace import job_events, worker_events
from tests.pvrd.conftest import TEXT

pytestmark = pytest.mark.bus


def jobs(caller: Any, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = plain(
        caller.call("ListJobs", "a{sv}", [caller.options(**options)]).body[0]
    )
    return found


@pytest.fixture(scope="module")
def daemon(start: Any) -> Any:
    return start({"limits.queue": 32})


def test_sessions_and_jobs_are_listed(daemon: Any, caller: Any, lines: Any, until: Any) -> None:
    caller.state("gpu")
    assert jobs(caller) == []
    session = caller.open_text(priority=7, share=30)
    until(lambda: caller.get("Ready", session, TEXT))
    (row,) = jobs(caller)
    assert (row["session"], row["job"], row["kind"]) == (session, "", "text")
    assert (row["state"], row["priority"], row["share"]) == ("idle", 7, 30)
    assert row["uid"] == os.getuid()
    stream = lines(caller.generate(session, "slow", max_tokens=400))
    while (stream.next() or {}).get("type") != "token":
        pass
    (row,) = jobs(caller)
    assert (row["session"], row["state"], row["device"]) == (session, "running", "gpu")
    assert row["job"].startswith("j")
    assert row["tokens"] >= 1
    assert row["position"] == 0
    assert row["seconds"] >= row["running_s"] > 0
    caller.call("Close", path=session, interface=TEXT)
    stream.rest()
    until(lambda: jobs(caller) == [])


def test_those_that_wait_have_a_position(daemon: Any, caller: Any, lines: Any, until: Any) -> None:
    sessions = [caller.open_text() for _ in range(11)]
    streams = [lines(caller.generate(s, "slow", max_tokens=4000)) for s in sessions]

    def waiting() -> list[int]:
        return sorted(row["position"] for row in jobs(caller) if row["state"] == "waiting")

    until(lambda: waiting() == [1, 2, 3], "three jobs that wait")
    for session in sessions:
        caller.call("Close", path=session, interface=TEXT)
    for stream in streams:
        stream.rest()


def test_all_is_for_those_who_may(daemon: Any, caller: Any) -> None:
    session = caller.open_text()
    assert [row["session"] for row in jobs(caller, all=True)] == [session]
    assert caller.fails("ListJobs", "a{sv}", [caller.options(every=True)])[0] == "InvalidArgument"
    caller.call("Close", path=session, interface=TEXT)


def test_a_trace_is_a_file_for_perfetto(daemon: Any, caller: Any, lines: Any) -> None:
    session = caller.open_text()
    stream = lines(caller.generate(session, "slow", max_tokens=20))
    reply = caller.call("Trace", "a{sv}", [caller.options(seconds=0.5)])
    fd = reply.fds.take(reply.body[0])
    trace = json.loads(os.pread(fd, 1 << 24, 0))
    os.close(fd)
    stream.rest()
    events = trace["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"pvrd", "pvrd-worker gpu", "pvrd-worker cpu"}
    slices = [e for e in events if e.get("cat") == "slice"]
    assert all(e["ph"] == "X" and e["dur"] == 1500 for e in slices)
    assert len(slices) == 2
    (begin,) = [e for e in events if e.get("ph") == "b" and e["name"].startswith("text ")]
    assert begin["args"]["session"] == session
    assert "prompt" not in json.dumps(trace)
    assert trace["otherData"]["lost"] == []
    name, why = caller.fails("Trace", "a{sv}", [caller.options(seconds=0)])
    assert (name, "seconds" in why) == ("InvalidArgument", True)
    caller.call("Close", path=session, interface=TEXT)


def test_one_trace_at_a_time_and_a_lost_worker(start: Any, caller: Any, kill: Any) -> None:
    start()
    caller.state("gpu")
    gpu = next(d for d in caller.get("Devices") if d["kind"] == "gpu")
    one = caller.loop.create_task(
        caller.connection.call(
            "org.pvrd.Pvrd1", "/org/pvrd/Pvrd1", "org.pvrd.Pvrd1.Manager", "Trace", "a{sv}",
            [caller.options(seconds=2.0)], (), 30.0,
        )
    )  # fmt: skip
    assert caller.fails("Trace", "a{sv}", [caller.options(seconds=0.1)])[0] == "Busy"
    kill(gpu["pid"])
    reply = caller.run(one)
    fd = reply.fds.take(reply.body[0])
    trace = json.loads(os.pread(fd, 1 << 24, 0))
    os.close(fd)
    assert trace["otherData"]["lost"] == ["gpu"]


def test_a_share_counts_until_its_picture_is_done(start: Any, caller: Any, tmp_path: Path) -> None:
    start()
    caller.open_text(share=80)
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG")
    with path.open("rb") as file:
        call = ("Upscale", "ha{sv}", [0, caller.options(share=30)])
        assert caller.fails(*call, fds=[file.fileno()])[0] == "Busy"
        caller.call("Upscale", "ha{sv}", [0, caller.options(share=20)], fds=[file.fileno()])
    caller.open_text(share=20)


def test_events_that_are_none_are_left_out() -> None:
    raw = [["slice", 1, 2, "a", "text", "x"], [], ["kernel", 5, 6, "matvec"], "abc", ["run", 1, 2]]
    assert [e["name"] for e in worker_events(7, raw)] == ["matvec"]
    (run, clock) = worker_events(7, [["run", 10, 8, "decode", 1, 5]])
    assert (run["ts"], run["dur"], clock["ts"], clock["dur"]) == (10, 8, 13, 5)


def test_jobs_that_ended_while_tracing_are_kept() -> None:
    known = Jobs()
    with known.of(Job("j1", "text", "m", 0, 5)):
        pass
    known.ended = []
    with known.of(Job("j2", "text", "m", 0, 5, 30)) as job:
        assert known.shares() == 30
        job.at("running", "gpu")
    assert [j.id for j in known.ended] == ["j2"]
    events = job_events(known.ended, 0.0, 1.0)
    assert [e["ph"] for e in events] == ["b", "e", "b", "e"]
    assert known.shares() == 0


def test_the_cpu_is_told_no_short_slices() -> None:
    short = Decision(slice_ms=2.0, share=0.5)
    assert orders(short, "gpu")["slice_ms"] == 2.0
    assert orders(short, "cpu")["slice_ms"] == CPU_SLICE_MS
    assert [orders(short, kind)["share"] for kind in ("gpu", "cpu")] == [0.5, 1.0]


def test_heat_takes_of_both_devices_time() -> None:
    """Smaller slices alone, one after the other, would not cool anything."""
    hot = Decision(share=0.75, group_scale=0.25)
    assert [orders(hot, kind)["share"] for kind in ("gpu", "cpu")] == [0.25, 0.25]
    warm = Decision(share=0.5, group_scale=0.75)
    assert [orders(warm, kind)["share"] for kind in ("gpu", "cpu")] == [0.5, 0.75]
    for decision in (hot, warm):  # a slice and its rest
        told = orders(decision, "cpu")
        assert told["slice_ms"] / told["share"] == CPU_SLICE_MS
