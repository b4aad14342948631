# SPDX-License-Identifier: Apache-2.0
"""Text over the bus, with real workers that are killed, stopped and made to fail on the way."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pvrd.client import Client, TextSession
from tests.buses import WAIT_S, until
from tests.daemons import PROMPT, Daemon

pytestmark = pytest.mark.bus

Start = Callable[..., Daemon]
Event = dict[str, Any]
TOKENS = 40
# A fault -> a piece of the reason that the client reads.
REASONS = {
    "device_lost": "lost its device",
    "nan": "lost its device",
    "exit": "ended",
    "hang": "did not answer",
}
GPU = pytest.param("gpu", marks=pytest.mark.gpu)


def tokens(events: list[Event]) -> list[int]:
    """The ids, after a look at the numbers: each token once, in order."""
    found = [e for e in events if e["type"] == "token" and "id" in e]
    assert [e["n"] for e in found] == list(range(len(found)))
    return [e["id"] for e in found]


def text(events: list[Event]) -> str:
    return "".join(str(e.get("text", "")) for e in events)


def session(client: Client, device: str = "auto", **settings: Any) -> TextSession:
    return client.open_text({"model": "tiny", "device": device, "context": 128, **settings})


def answer(where: TextSession, n: int = TOKENS, **settings: Any) -> list[Event]:
    return list(where.generate(PROMPT, {"max_tokens": n, **settings}))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, models: Path) -> list[Event]:
    """The answer on a CPU that nobody disturbs."""
    with (
        Daemon(tmp_path_factory.mktemp("undisturbed"), models, {}) as daemon,
        daemon.client() as client,
        session(client, "cpu") as where,
    ):
        return answer(where, top5=True)


def test_undisturbed_answer(undisturbed: list[Event]) -> None:
    start, *middle, end = undisturbed
    assert (start["type"], start["model"], start["device"]) == ("start", "tiny", "cpu")
    assert len(tokens(undisturbed)) == TOKENS
    assert (end["type"], end["reason"], end["restarts"]) == ("end", "length", 0)
    assert end["stats"]["decode_tokens"] == TOKENS - 1
    # What makes equality a fair demand: no near tie anywhere.
    best = [e["top5"] for e in middle if "top5" in e]
    assert min(t[0][1] - t[1][1] for t in best) > 0.3
    assert [t[0][0] for t in best] == tokens(undisturbed)


@pytest.mark.gpu
def test_gpu_writes_the_same_ids(daemon: Start, undisturbed: list[Event]) -> None:
    running = daemon({"gpu.allow_software": True})
    with running.client() as client:
        running.ready(client, "gpu")
        with session(client, "gpu") as where:
            events = answer(where)
    assert events[0]["device"] == "gpu"
    assert tokens(events) == tokens(undisturbed)
    assert text(events) == text(undisturbed)


def disturbed(stream: Iterator[Event], at: int, action: Callable[[], None]) -> list[Event]:
    """The whole stream; `action` happens after token `at`."""
    events = []
    for event in stream:
        events.append(event)
        if event.get("n") == at:
            action()
    return events


def check(events: list[Event], undisturbed: list[Event], devices: list[str]) -> None:
    """The text went on with the next token, and the client noticed nothing but the device."""
    assert tokens(events) == tokens(undisturbed)
    assert text(events) == text(undisturbed)
    named = [e["device"] for e in events if e["type"] in ("start", "device")]
    assert named == devices
    assert events[-1]["type"] == "end"
    assert events[-1]["reason"] == "length"
    assert events[-1]["restarts"] == len(devices) - 1
    assert events[-1]["device"] == devices[-1]


@pytest.mark.parametrize("kind", ["cpu", GPU])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_in_the_middle(
    daemon: Start, undisturbed: list[Event], kind: str, number: int
) -> None:
    running = daemon(
        {
            "gpu.allow_software": kind == "gpu",
            "deadlines.slice_s": 4.0,
            "deadlines.ping_s": 0.2,
            "workers.backoff_s": 0.1,
            # Slow, so that the signal finds the answer unfinished.
            "debug.faults": [f"{kind}:slow:20"],
        }
    )
    with running.client() as client, session(client) as where:
        pid = running.ready(client, kind)["pid"]
        stream = where.generate(PROMPT, {"max_tokens": TOKENS})
        events = disturbed(iter(stream), 9, lambda: os.kill(pid, number))
        check(events, undisturbed, [kind, "cpu"])
        successor = running.ready(client, kind, 2)
        assert successor["pid"] != pid
        # New work returns to it.
        with session(client) as again:
            events = answer(again)
    check(events, undisturbed, [kind])


@pytest.mark.parametrize("fault", REASONS)
def test_failing_cpu_worker(daemon: Start, undisturbed: list[Event], fault: str) -> None:
    running = daemon(
        {
            "debug.faults": [f"cpu:{fault}:15"],
            "deadlines.slice_s": 4.0,
            "deadlines.ping_s": 0.2,
            "workers.backoff_s": 0.1,
        }
    )
    with running.client() as client, session(client) as where:
        events = answer(where)
    check(events, undisturbed, ["cpu", "cpu"])
    log = running.log.read_text()
    assert "Traceback" not in log
    assert PROMPT not in log
    reason = next(e["reason"] for e in events if e["type"] == "device")
    assert REASONS[fault] in reason


@pytest.mark.gpu
def test_reported_device_loss(daemon: Start, undisturbed: list[Event]) -> None:
    running = daemon(
        {
            "gpu.allow_software": True,
            "debug.faults": ["gpu:device_lost:15"],
            "workers.backoff_s": 0.1,
        }
    )
    with running.client() as client:
        running.ready(client, "gpu")
        with session(client) as where:
            check(answer(where), undisturbed, ["gpu", "cpu"])
        running.ready(client, "gpu", 2)
        with session(client) as where:
            check(answer(where), undisturbed, ["gpu"])


def test_drawn_text_goes_on_as_it_would_have(daemon: Start) -> None:
    settings = {"temperature": 1.2, "seed": 11, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    running = daemon({"debug.faults": ["cpu:device_lost:15"]})
    with running.client() as client, session(client) as where:
        first = answer(where, **settings)
        assert first[-1]["restarts"] == 1
        second = answer(where, **settings)
    assert second[-1]["restarts"] == 0
    assert tokens(first) == tokens(second)


def test_two_sessions_and_a_cancelled_one(daemon: Start, undisturbed: list[Event]) -> None:
    running = daemon({"debug.faults": ["cpu:slow:5"]})
    with running.client() as client, session(client) as one, session(client) as two:
        streams = [one.generate(PROMPT, {"max_tokens": TOKENS}), two.generate(PROMPT, {})]
        first = iter(streams[1])
        assert next(first)["type"] == "start"
        two.cancel()
        rest = list(first)
        assert rest[-1]["reason"] == "cancelled"
        check(list(streams[0]), undisturbed, ["cpu"])
        # The session is of use after it.
        check(answer(two), undisturbed, ["cpu"])


def test_reader_that_goes_away_cancels(daemon: Start) -> None:
    running = daemon({"debug.faults": ["cpu:slow:5"]})
    with running.client() as client, session(client) as where:
        stream = where.generate(PROMPT, {"max_tokens": 100})
        next(iter(stream))
        stream.close()

        def cancelled() -> bool:
            return client.statistics()["jobs"]["cancelled"] == 1

        until(cancelled, "a cancelled job")
        assert where.count_tokens("abc") > 0


def test_stuck_worker_ends_with_the_daemon(daemon: Start) -> None:
    # A worker in a driver call that never returns does not see the end of its socket.
    running = daemon({"debug.faults": ["cpu:hang:3"]})
    with running.client() as client, session(client) as where:
        pid = os.pidfd_open(running.ready(client, "cpu")["pid"])
        stream = iter(where.generate(PROMPT, {"max_tokens": 20}))
        while next(stream).get("n") != 1:
            pass
        running.process.kill()
        assert select.select([pid], [], [], WAIT_S)[0]
    os.close(pid)
