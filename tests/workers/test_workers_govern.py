# SPDX-License-Identifier: Apache-2.0
"""What the governor says is kept to, and what the worker tells of its time, in the real program."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.base import RunStats
from engine.pace import ASIDE, LIMIT, Fit
from pvrd.workers import protocol
from pvrd.workers.canary import EVERY_S, KINDS, KNOWN, WINDOW, Canary
from pvrd.workers.recorder import A_MESSAGE, Recorder
from pvrd.workers.timings import KERNELS_EVERY, NAMED_MS, PARTS, Meter, MeteredExecutable, Spans
from tests.workers.conftest import Peer

Start = Callable[..., Peer]
PROMPT = "Once upon a time"
LONG = "word " * 30  # some 90 tokens of the tiny model: several pieces of a prompt


def submissions(worker: Peer) -> int:
    worker.send("stats")
    return int(worker.expect("stats")["counters"]["submissions"])


def test_parked_runs_no_slice_and_answers(peer: Start, tiny: Path) -> None:
    worker = peer(threads=1)
    worker.load(tiny)
    worker.send("govern", slice_ms=2.0, group_scale=1.0, share=1.0, parked=True)
    worker.text("1", PROMPT, max_tokens=3)
    for n in range(5):
        worker.send("ping", n=n)
        assert worker.recv() == {"t": "pong", "n": n}
    worker.send("count", job="c", model="m", text=PROMPT)
    assert worker.recv()["t"] == "count"
    assert submissions(worker) == 0
    worker.send("govern", slice_ms=2.0, group_scale=1.0, share=1.0, parked=False)
    assert len(worker.answer("1")) == 4


def test_short_slices_cut_a_prompt_into_pieces_and_the_answer_is_the_same(
    peer: Start, tiny: Path
) -> None:
    worker = peer(threads=1)
    worker.load(tiny)
    worker.text("1", LONG[:70], session="a", max_tokens=8)
    whole = worker.answer("1")
    before = submissions(worker)
    worker.send("govern", slice_ms=0.001, group_scale=1.0, share=1.0, parked=False)
    worker.text("2", LONG[:70], session="b", max_tokens=8)
    cut = worker.answer("2")
    assert [m["id"] for m in cut[:-1]] == [m["id"] for m in whole[:-1]]
    tokens = cut[-1]["stats"]["prefill_tokens"]
    assert tokens > 32
    # Pieces of 16 tokens, or a few more, then a slice a token.
    assert before < submissions(worker) - before <= -(-tokens // 16) + 7


def test_work_takes_its_share_of_the_time_alone(peer: Start, tiny: Path) -> None:
    worker = peer(threads=1, faults=["cpu:slow:2"])
    worker.load(tiny)
    worker.send("govern", slice_ms=20.0, group_scale=1.0, share=0.25, parked=False)
    worker.send("trace", job="t", on=True)
    worker.text("1", PROMPT, max_tokens=12)
    worker.answer("1")
    worker.send("trace", job="t", on=False)
    events = [e for m in worker.until("trace.done")[:-1] for e in m["events"]]
    slices = [e for e in events if e[0] == "slice"]
    assert len(slices) >= 12
    for one, other in itertools.pairwise(slices):
        assert other[1] - (one[1] + one[2]) >= 2.9 * one[2]


def test_a_higher_priority_waits_for_one_slice(peer: Start, tiny: Path) -> None:
    worker = peer(threads=1, faults=["cpu:slow:4"])
    worker.load(tiny, "m")
    worker.load(tiny, "n")  # another model: no slice is for both
    worker.text("low", PROMPT, session="a", max_tokens=60, priority=3)
    worker.until("text.token", n=2)
    # It hears both at once, however long a busy machine lets this process wait in between.
    os.kill(worker.process.pid, signal.SIGSTOP)
    worker.send("ack", job="low", n=60)
    worker.text("high", PROMPT, session="b", model="n", max_tokens=8, priority=12)
    os.kill(worker.process.pid, signal.SIGCONT)
    # What the socket held already, then the one slice under way.
    seen = worker.until("text.start", job="high")
    assert [m["job"] for m in seen[:-1] if m["t"] == "text.token"].count("low") <= 13
    after = worker.until("text.end", job="high")
    between = [m for m in after if m["t"] == "text.token" and m["job"] == "low"]
    assert len(between) <= 2  # so that it does not starve
    assert worker.until("text.end", job="low")


def test_the_canary_speaks_while_there_is_work(peer: Start, tiny: Path) -> None:
    worker = peer(threads=1, faults=["cpu:slow:5"])
    worker.load(tiny)
    job = 0
    while not any(told["ratio"] for told in worker.canary):
        job += 1
        worker.text(str(job), PROMPT, session=f"s{job % 2}", max_tokens=40)
        worker.answer(str(job))
    assert all(0 < told["busy"] <= 1 and told["slices"] >= 1 for told in worker.canary)
    assert worker.canary[-1]["ratio"] > 0.5


def test_the_end_tells_where_the_time_went_and_names_a_wait(peer: Start, tiny: Path) -> None:
    worker = peer(threads=1, faults=["cpu:slow:1"])
    worker.load(tiny)
    worker.text("1", PROMPT, max_tokens=20)
    worker.until("text.token", n=protocol.MAX_AHEAD - 1)
    end = time.monotonic() + 4 * NAMED_MS / 1000  # the reader is slow: the job waits for it
    n = 0
    while time.monotonic() < end:
        n += 1
        worker.send("ping", n=n)
        worker.expect("pong", n=n)
    worker.send("ack", job="1", n=20)
    stats = worker.expect("text.end")["stats"]
    assert all(stats[f"{part}_ms"] >= 0 for part in PARTS)
    assert stats["compute_ms"] >= 20  # a millisecond of each slice
    assert stats["input_wait_ms"] >= 3 * NAMED_MS
    assert stats["input_wait_at"] == protocol.MAX_AHEAD
    assert len(stats) <= 20  # as many as pvrd passes on
    worker.send("stats")
    times = worker.expect("stats")["times"]
    assert times["compute"] == pytest.approx(stats["compute_ms"], rel=0.01)


def test_traces_are_of_those_who_asked(peer: Start, tiny: Path) -> None:
    worker = peer(threads=1)
    worker.load(tiny)
    worker.send("trace", job="other", on=False)
    assert worker.recv() == {"t": "trace.done", "job": "other"}
    worker.send("trace", job="t", on=True)
    worker.text("1", PROMPT, max_tokens=50)
    traced = worker.answer("1")
    worker.send("trace", job="t", on=False)
    told = worker.until("trace.done", job="t")
    worker.text("2", PROMPT, max_tokens=50)  # without a trace
    assert [m.get("id") for m in worker.answer("2")] == [m.get("id") for m in traced]
    events = [event for message in told[:-1] for event in message["events"]]
    slices = [e for e in events if e[0] == "slice"]
    runs = [e for e in events if e[0] == "run"]
    assert {e[3] for e in slices} == {"1"}
    assert {e[4] for e in slices} == {"text"}
    assert {e[3] for e in runs} == {"prefill+tail+head", "decode+head"}
    kernels = [e for e in events if e[0] == "kernel"]
    assert {"matvec", "rope_kv", "topk"} <= {e[3] for e in kernels}
    assert len(kernels) < 3 * len(runs)  # those of few slices
    assert sum(e[2] for e in kernels) <= sum(e[2] for e in runs) + len(kernels)
    for run in runs:
        assert any(s[1] <= run[1] + 50 and run[1] + run[2] <= s[1] + s[2] + 50 for s in slices)
    worker.send("trace", job="t", on=False)
    assert worker.recv() == {"t": "trace.done", "job": "t"}


def test_a_long_trace_comes_in_messages_that_fit() -> None:
    recorder = Recorder(Meter())
    recorder.begin("t")

    class Long:
        priority = 5

        def subject(self) -> dict[str, str]:
            return {"session": "s" * 60}

    task: Any = Long()
    for i in range(2 * A_MESSAGE + 1):
        recorder.slice(task, 1e6 + i, 1e6 + i + 0.5)
    told = list(recorder.end("t"))
    assert [len(m.get("events", ())) for m in told] == [A_MESSAGE, A_MESSAGE, 1, 0]
    assert all(protocol.encode(message) for message in told)


def test_fit_grows_while_there_is_time_and_comes_back_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit = Fit(16)
    assert fit.most(512) == 512  # nobody asked for less
    monkeypatch.setattr(LIMIT, "slice_s", 0.002)
    seen = []
    for _ in range(12):
        count = fit.most(512)
        seen.append(count)
        fit.took(count, count * 1e-5)  # 10 µs each
    assert seen[:4] == [16, 32, 64, 128]
    assert max(seen) * 1e-5 <= 0.002
    assert seen[-1] >= 160
    fit.took(seen[-1], 0.02)  # ten times as long: somebody else is there
    assert fit.most(512) == 16
    fit.took(16, 0.5)
    assert fit.most(512) == 16
    assert Fit(16).most(8) == 8
    monkeypatch.setattr(LIMIT, "slice_s", 0.0)
    monkeypatch.setattr(LIMIT, "scale", 0.25)
    assert Fit(16).most(512) == 128
    assert Fit(1).most(2) == 1


def test_where_the_least_takes_too_long_it_is_the_measure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LIMIT, "slice_s", 0.002)
    strict, fit = Fit(16), Fit(16, over=1.5)
    for _ in range(20):
        for one in (strict, fit):
            count = one.most(512)
            one.took(count, 0.01 + count * 1e-5)  # reading the weights is most of it
    assert strict.most(512) == 16
    assert 200 <= fit.most(512) <= 600
    fit.took(fit.most(512), 0.15)  # somebody else is there
    assert fit.most(512) < 100


def test_canary_measures_against_the_same_slice_alone() -> None:
    canary = Canary()
    now = 10.0

    def work(seconds: float, ms: float, kind: str = "decode") -> dict[str, Any]:
        nonlocal now
        told: dict[str, Any] = {}
        for _ in range(int(seconds * 1000 / ms)):
            canary.slice(kind, ms / 1000)
            now += ms / 1000
            told = canary.tell(now) or told
        return told

    for _ in range(KNOWN - 1):
        canary.slice("decode", 0.004)
    assert canary.tell(now) is None
    assert (canary.tell(now + EVERY_S) or {})["ratio"] is None
    now += EVERY_S
    assert work(1.0, 4)["ratio"] == pytest.approx(1.0)
    assert work(1.0, 8)["ratio"] == pytest.approx(2.0, rel=0.01)
    assert work(5.0, 8)["ratio"] == pytest.approx(2.0, rel=0.02)  # it is not the measure so soon
    assert work(1.0, 4)["ratio"] == pytest.approx(1.0, rel=0.02)
    told = work(1.0, 4)
    assert told["busy"] == pytest.approx(1.0, abs=0.02)
    assert told["slices"] == pytest.approx(EVERY_S * 250, abs=2)
    assert work(1.0, 2, "prefill")["ratio"] == pytest.approx(1.0)  # a kind of its own
    # A device that was clocked down for good becomes the measure, in the end.
    for _ in range(40):
        told = work(60.0, 8)
    assert told["ratio"] < 1.3
    assert KNOWN < WINDOW


def test_canary_keeps_few_kinds() -> None:
    canary = Canary()
    for i in range(2000):
        canary.slice(i, 0.001)
    assert len(canary._kinds) == KINDS


def test_spans_have_no_gaps() -> None:
    now = 5.0
    meter = Meter()
    spans = Spans(meter, lambda: now)
    now = 5.010
    spans.waits("queue", now)
    now = 5.030
    spans.begins(now)
    meter.upload += 0.006
    meter.compute += 0.010
    meter.download += 0.001
    now = 5.050
    taken = spans.take(behind_s=0.001)
    assert taken == {
        "input": 10.0, "queue": 21.0, "upload": 6.0, "compute": 10.0, "download": 1.0, "host": 3.0,
    }  # fmt: skip
    sums = spans.sums()
    assert sums["queue_wait_ms"] == 20.0
    assert sums["upload_wait_ms"] == 6.0
    assert "download_wait_ms" not in sums


@pytest.mark.gpu
def test_a_traced_gpu_shows_kernels_and_gives_the_same_answer(peer: Start, tiny: Path) -> None:
    worker = peer("gpu", allow_software=True)
    worker.load(tiny)
    worker.text("1", PROMPT, session="a", max_tokens=50)
    whole = worker.answer("1")
    worker.send("trace", job="t", on=True)
    worker.text("2", PROMPT, session="b", max_tokens=50)
    traced = worker.answer("2")
    worker.send("trace", job="t", on=False)
    events = [e for m in worker.until("trace.done")[:-1] for e in m["events"]]
    assert [m["id"] for m in traced[:-1]] == [m["id"] for m in whole[:-1]]
    assert {"matvec", "topk"} <= {e[3] for e in events if e[0] == "kernel"}


def test_slices_that_are_run_apart_for_a_trace_are_none_of_the_canarys() -> None:
    class Device:
        def run(self, *sequences: str) -> RunStats:
            return RunStats(0.0)

        def run_apart(self, sequences: Any, apart: Any, before: Any, after: Any) -> RunStats:
            for at in apart:
                before(at)
                after(at)
            return RunStats(0.0)

    meter, seen = Meter(), []
    meter.canary.slice = lambda kind, seconds: seen.append(kind)  # type: ignore[method-assign]
    names: list[str] = []
    meter.kernel = lambda name, began, seconds: names.append(name)
    calls: Any = SimpleNamespace(
        sequences={"decode": [SimpleNamespace(op="matvec"), SimpleNamespace(op="topk")]}
    )
    device: Any = Device()
    made = MeteredExecutable(device, meter, calls, 1)
    for _ in range(2 * KERNELS_EVERY):
        made.run("decode")
    assert len(seen) == 2 * KERNELS_EVERY - 2
    assert names == ["matvec", "topk"] * 2


def test_slices_with_a_check_are_none_of_the_canarys() -> None:
    class Device:
        def run(self, *sequences: str) -> RunStats:
            ASIDE.add(1e-9)
            return RunStats(0.25)

    meter, seen = Meter(), []
    meter.canary.slice = lambda kind, seconds: seen.append(kind)  # type: ignore[method-assign]
    meter.gate.rhythm.took = lambda *args: seen.append(args)  # type: ignore[method-assign]
    device, calls = Device(), SimpleNamespace(sequences={"decode": []})
    made = MeteredExecutable(device, meter, calls, 1)  # type: ignore[arg-type]
    assert [made.run("decode").wall_s for _ in range(3)] == [0.25] * 3
    assert not seen
    assert meter.compute == 0.75  # what the device took; the rest is the host's
