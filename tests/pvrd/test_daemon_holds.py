# SPDX-License-Identifier: Apache-2.0
"""Holds, idle workers, the decision on the bus; with fake workers on a private bus."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from pvrd.bus_values import plain

pytestmark = pytest.mark.bus
TEXT = "org.pvrd.Pvrd1.TextSession"


@pytest.fixture(scope="module")
def daemon(start: Any) -> Any:
    return start()


def hold(caller: Any, reason: str = "a game", **options: Any) -> int:
    reply = caller.call("Hold", "sa{sv}", [reason, caller.options(**options)])
    return reply.fds.take(reply.body[0])


def device(caller: Any, kind: str = "gpu") -> dict[str, Any]:
    found: dict[str, Any] = next(d for d in caller.get("Devices") if d["kind"] == kind)
    return found


def test_a_hold_frees_the_gpu_and_its_end_brings_it_back(
    daemon: Any, caller: Any, until: Any, lines: Any
) -> None:
    caller.state("gpu")
    pid = device(caller)["pid"]
    fd = hold(caller)
    caller.state("cpu")
    assert caller.get("Reason") == "the GPU is held: a game"
    decision = caller.get("Decision")
    assert (decision["device"], decision["release"]) == ("cpu", True)
    assert decision["reason"] == "the GPU is held: a game"
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the GPU worker")
    asleep = device(caller)
    assert (asleep["state"], asleep["present"], asleep["name"]) == ("asleep", True, "Fake gpu")
    assert asleep["reason"] == "the GPU is held: a game"
    facts = plain(caller.call("GetDiagnostics").body[0])
    assert any("Fake gpu, asleep: the GPU is held" in f["message"] for f in facts)
    stream = lines(caller.generate(caller.open_text(), "hello", max_tokens=3))
    assert {line["device"] for line in stream.rest() if "device" in line} == {"cpu"}
    os.close(fd)
    caller.state("gpu")
    assert caller.get("Reason") == ""
    assert caller.get("Decision")["device"] == "gpu"
    assert "restarts" not in str(device(caller))


def test_a_decision_is_told_to_all(daemon: Any, caller: Any, until: Any) -> None:
    told: list[dict[str, Any]] = []
    caller.run(
        caller.connection.subscribe(
            lambda signal: told.append(plain(signal.body[1])),
            interface="org.freedesktop.DBus.Properties",
            member="PropertiesChanged",
        )
    )
    caller.state("gpu")
    told.clear()
    fd = hold(caller)
    caller.state("cpu")
    decisions = [values["Decision"] for values in told if "Decision" in values]
    assert [(d["device"], d["reason"]) for d in decisions] == [("cpu", "the GPU is held: a game")]
    assert any(values.get("Reason") == "the GPU is held: a game" for values in told)
    os.close(fd)
    caller.state("gpu")


def test_a_hold_lasts_as_long_as_any_copy_of_its_pipe(daemon: Any, caller: Any, until: Any) -> None:
    fd = hold(caller)
    copy = os.dup(fd)
    other = hold(caller, "another")
    caller.state("cpu")
    os.close(fd)
    assert caller.get("Reason") == "the GPU is held: a game, another"
    os.close(copy)
    until(lambda: caller.get("Reason") == "the GPU is held: another", "one hold less")
    os.close(other)
    caller.state("gpu")


def test_text_under_way_moves_at_a_token_and_comes_back_whole(
    daemon: Any, caller: Any, lines: Any
) -> None:
    caller.state("gpu")
    stream = lines(caller.generate(caller.open_text(), "slow", max_tokens=400))
    said = [stream.next() for _ in range(5)]
    assert said[0] is not None
    assert said[0]["device"] == "gpu"
    for _ in range(4):  # more often than a job may end workers
        fd = hold(caller)
        caller.state("cpu")
        os.close(fd)
        caller.state("gpu")
    rest = stream.rest()
    tokens = [line["n"] for line in (*said, *rest) if line and line["type"] == "token"]
    assert tokens == list(range(400))
    assert rest[-1]["type"] == "end"
    reasons = [line["reason"] for line in rest if line["type"] == "device"]
    assert any("held: a game" in reason for reason in reasons)


def test_a_text_that_is_to_leave_while_it_begins(daemon: Any, caller: Any, lines: Any) -> None:
    caller.state("gpu")
    stream = lines(caller.generate(caller.open_text(), "late", max_tokens=20))
    fd = hold(caller)
    rest = stream.rest()
    os.close(fd)
    assert [line["n"] for line in rest if line["type"] == "token"] == list(range(20))
    assert rest[-1]["type"] == "end", rest[-1]
    assert rest[-1]["device"] == "cpu"
    caller.state("gpu")


def test_a_hold_ends_with_its_caller(daemon: Any, caller: Any, callers: Any) -> None:
    caller.state("gpu")
    other = callers()
    fd = hold(other)
    caller.state("cpu")
    other.connection.close()
    caller.state("gpu")
    os.close(fd)


def test_holds_are_bounded_and_say_why(daemon: Any, caller: Any, until: Any) -> None:
    for reason in ("", "  ", "x" * 129, "a\nb"):
        assert caller.fails("Hold", "sa{sv}", [reason, {}])[0] == "InvalidArgument"
    name, text = caller.fails("Hold", "sa{sv}", ["x", caller.options(nonsense=True)])
    assert name == "InvalidArgument"
    assert "nonsense" in text
    before = daemon.fds()
    fds = [hold(caller, f"hold {i}") for i in range(16)]
    name, text = caller.fails("Hold", "sa{sv}", ["one more", {}])
    assert name == "QuotaExceeded"
    assert "16" in text
    for fd in fds:
        os.close(fd)
    caller.state("gpu")
    until(lambda: daemon.fds() <= before, "all pipes closed")


def test_decisions_are_in_the_journal_once(start: Any, caller: Any, lines: Any) -> None:
    daemon = start()
    caller.state("gpu")
    fd = hold(caller, "a film")
    caller.state("cpu")
    os.close(fd)
    caller.state("gpu")
    lines = [line for line in daemon.text().splitlines() if "governor:" in line]
    assert len(lines) == 2, lines
    assert "device cpu" in lines[0]
    assert "the GPU is held: a film" in lines[0]
    assert "nothing asks for less" in lines[1]


def test_the_canary_moves_the_decision_and_is_shown(
    start: Any, caller: Any, lines: Any, until: Any
) -> None:
    start()
    caller.state("gpu")
    session = caller.open_text()
    stream = lines(caller.generate(session, "slow canary:3", max_tokens=2000))
    until(lambda: caller.get("Decision")["share"] == 0.5, "half of the GPU's time")
    decision = caller.get("Decision")
    assert "3.0 times as long as alone" in decision["reason"]
    assert decision["slice_ms"] == 2.0
    rows = plain(caller.call("GetStatistics").body[0])["sensors"]
    canary = next(row for row in rows if row["name"] == "canary")
    assert (canary["value"], canary["source"]) == (3.0, "the GPU worker")
    caller.call("Cancel", path=session, interface=TEXT)
    stream.rest()


def test_workers_with_nothing_to_do_end_and_the_next_job_starts_them(
    start: Any, caller: Any, lines: Any, until: Any
) -> None:
    daemon = start({"workers.idle_s": 0.2, "models.keep_s": 0.1})

    def states() -> list[str]:
        return [d["state"] for d in caller.get("Devices")]

    until(lambda: states() == ["asleep", "asleep"], "both workers asleep")
    assert caller.get("State") == "gpu", "what new work would get"
    assert caller.get("Reason") == ""
    assert [d["name"] for d in caller.get("Devices")] == ["Fake gpu", "Fake cpu"]
    assert all(d["pid"] == 0 for d in caller.get("Devices"))
    for wanted in ("gpu", "cpu"):
        session = caller.open_text(device=wanted)
        said = lines(caller.generate(session, "hello", max_tokens=3)).rest()
        assert said[0]["device"] == wanted
        assert said[-1]["type"] == "end"
        caller.call("Close", path=session, interface=TEXT)
    until(lambda: states() == ["asleep", "asleep"], "both workers asleep again")
    counters = plain(caller.call("GetStatistics").body[0])
    assert counters["gpu"]["restarts"] == counters["cpu"]["restarts"] == 0
    assert "is gone" not in daemon.text()


def test_a_session_keeps_its_worker(start: Any, caller: Any, lines: Any, until: Any) -> None:
    start({"workers.idle_s": 0.2, "models.keep_s": 0.1})
    session = caller.open_text(device="gpu")
    lines(caller.generate(session, "hello", max_tokens=3)).rest()
    until(lambda: device(caller, "cpu")["state"] == "asleep", "the other worker asleep")
    assert device(caller)["state"] == "ready"


def test_busy_says_the_position(start: Any, caller: Any, lines: Any, until: Any) -> None:
    start({"limits.queue": 10})
    streams, sessions = [], [caller.open_text() for _ in range(11)]
    for session in sessions[:10]:
        streams.append(lines(caller.generate(session, "slow", max_tokens=100000)))
    until(
        lambda: plain(caller.call("GetStatistics").body[0])["jobs"]["waiting"] == 2, "two that wait"
    )
    name, text = caller.fails("Generate", "sa{sv}", ["x", {}], path=sessions[10], interface=TEXT)
    assert name == "Busy"
    assert "position 3 of the queue" in text
    for stream in streams:
        os.close(stream.fd)


@pytest.mark.long
def test_an_idle_daemon_wakes_less_than_once_a_second(start: Any, caller: Any) -> None:
    daemon = start({"sensors.system": True})
    caller.state("gpu")

    def switches() -> int:
        with open(f"/proc/{daemon.process.pid}/status", encoding="ascii") as file:
            row = next(line for line in file if line.startswith("voluntary"))
        return int(row.split()[1])

    time.sleep(3.0)  # the start is over
    before, began = switches(), time.monotonic()
    time.sleep(20.0)
    assert switches() - before < time.monotonic() - began


def test_where_there_is_no_gpu_worker_a_hold_ends_none(
    start: Any, callers: Any, until: Any
) -> None:
    daemon = start({"gpu.enabled": False})
    caller = callers()
    caller.state("cpu")
    fd = hold(caller)
    until(lambda: caller.get("Decision")["release"], "the decision")
    os.close(fd)
    until(lambda: not caller.get("Decision")["release"], "its end")
    assert device(caller)["state"] == "disabled"
    assert "worker is ended" not in daemon.text()
