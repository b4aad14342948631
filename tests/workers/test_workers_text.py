# SPDX-License-Identifier: Apache-2.0
"""Text jobs in the real worker program, on the CPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pvrd.workers import protocol
from tests.workers.conftest import Peer, journal

Start = Callable[..., Peer]
PROMPT = "Once upon a time"


def ids(answer: list[dict[str, Any]]) -> list[int]:
    return [m["id"] for m in answer if m["t"] == "text.token"]


def text(answer: list[dict[str, Any]]) -> str:
    return "".join(m["text"] for m in answer)


@pytest.fixture
def worker(peer: Start, tiny: Path) -> Peer:
    made = peer(threads=1)
    made.load(tiny)
    return made


def test_answer(worker: Peer) -> None:
    worker.text("1", PROMPT, max_tokens=40)
    start = worker.expect("text.start")
    assert start["job"] == "1"
    assert start["prompt_tokens"] > 0
    assert start["context"] > 40
    answer = worker.answer("1")
    assert [m["n"] for m in answer[:-1]] == list(range(40))
    assert answer[-1]["reason"] == "length"
    assert answer[-1]["stats"]["decode_tokens"] == 39
    assert answer[-1]["stats"]["prefill_tokens"] == start["prompt_tokens"]


def test_cut_anywhere_the_answer_goes_on_with_the_next_token(peer: Start, tiny: Path) -> None:
    first = peer(threads=1)
    first.load(tiny)
    first.text("1", PROMPT, max_tokens=24, temperature=0.8, seed=7)
    whole = first.answer("1")
    successor = peer(threads=1, generation=2)
    successor.load(tiny)
    for cut in (1, 9, 23):
        done = ids(whole)[:cut]
        successor.text(
            f"c{cut}", PROMPT, done, session=f"s{cut}", max_tokens=24, temperature=0.8, seed=7
        )
        rest = successor.answer(f"c{cut}")
        assert rest[0]["n"] == cut
        assert done + ids(rest) == ids(whole)
        assert "".join(m["text"] for m in whole[:cut]) + text(rest) == text(whole)
        assert rest[-1]["reason"] == whole[-1]["reason"]
    everything = ids(whole)
    successor.text("all", PROMPT, everything, session="all", max_tokens=24, temperature=0.8, seed=7)
    assert ids(successor.answer("all")) == []


def test_stops_sixteen_tokens_ahead_until_acknowledged(worker: Peer) -> None:
    worker.text("1", PROMPT, max_tokens=60)
    last = worker.until("text.token", n=protocol.MAX_AHEAD - 1)
    assert len([m for m in last if m["t"] == "text.token"]) == protocol.MAX_AHEAD
    # The worker is parked: it answers and says nothing else.
    for n in range(3):
        worker.send("ping", n=n)
        assert worker.recv() == {"t": "pong", "n": n}
    worker.send("ack", job="1", n=3)
    assert worker.until("text.token", n=protocol.MAX_AHEAD + 2)
    worker.send("ping", n=9)
    assert worker.recv() == {"t": "pong", "n": 9}


def test_cancel_within_one_slice(worker: Peer) -> None:
    worker.text("1", PROMPT, max_tokens=60)
    worker.until("text.token", n=protocol.MAX_AHEAD - 1)
    worker.send("cancel", job="1")
    end = worker.recv()
    assert (end["t"], end["reason"], end["job"]) == ("text.end", "cancelled", "1")
    worker.send("cancel", job="1")  # over already: no error
    worker.text("2", PROMPT, max_tokens=3)
    assert len(ids(worker.answer("2"))) == 3


def test_cancel_before_the_first_slice(worker: Peer) -> None:
    worker.text("1", PROMPT, max_tokens=60)
    worker.text("2", PROMPT, max_tokens=60)  # of the same session: waits
    worker.until("text.token", job="1", n=protocol.MAX_AHEAD - 1)
    worker.send("cancel", job="2")
    end = worker.recv()
    assert (end["t"], end["job"], end["reason"]) == ("text.end", "2", "cancelled")


def test_sessions_take_turns_and_do_not_touch_each_other(peer: Start, tiny: Path) -> None:
    # Slow slices: all three jobs have come before the first is done.
    worker = peer(threads=1, faults=["cpu:slow:3"])
    worker.load(tiny)
    prompts = {str(i): f"{i} {PROMPT}" for i in range(3)}
    alone = {}
    for job, prompt in prompts.items():
        worker.text(job, prompt, session=f"alone{job}", max_tokens=12)
        alone[job] = ids(worker.answer(job))
    worker.send("stats")
    before = worker.expect("stats")["counters"]["submissions"]
    for job, prompt in prompts.items():
        worker.text(f"t{job}", prompt, session=job, max_tokens=12)
    order: list[str] = []
    got: dict[str, list[int]] = {job: [] for job in prompts}
    left = len(prompts)
    while left:
        message = worker.recv()
        assert message["t"] != "error", message
        if message["t"] == "text.token":
            job = message["job"][1:]
            order.append(job)
            got[job].append(message["id"])
        left -= message["t"] == "text.end"
    assert got == alone
    assert all(set(order[i : i + 9]) == set(prompts) for i in range(3, len(order) - 12))
    # Most slices brought each of them a token.
    worker.send("stats")
    assert worker.expect("stats")["counters"]["submissions"] - before < 3 * 12 - 6


def test_jobs_of_one_session_run_one_after_the_other(worker: Peer) -> None:
    worker.text("1", PROMPT, max_tokens=10)
    worker.text("2", PROMPT, max_tokens=10)
    seen = worker.until("text.end", job="2")
    jobs = [m["job"] for m in seen]
    assert jobs == sorted(jobs)
    tokens = [(m["job"], m["id"]) for m in seen if m["t"] == "text.token"]
    assert [i for j, i in tokens if j == "1"] == [i for j, i in tokens if j == "2"]


def test_second_turn_of_a_talk_prefills_only_what_is_new(worker: Peer) -> None:
    worker.text("1", PROMPT, max_tokens=8)
    answer = worker.answer("1")
    first = answer[-1]["stats"]["prefill_tokens"]
    worker.text("2", PROMPT + "!", max_tokens=8)
    second = worker.answer("2")[-1]["stats"]["prefill_tokens"]
    assert 0 < second < first


def test_context_is_the_sessions(worker: Peer) -> None:
    worker.send("count", job="n", model="m", text="x" * 200)
    tokens = worker.expect("count")["tokens"]
    worker.text("1", "x", session="a", context=32, max_tokens=100)
    assert worker.expect("text.start")["context"] == 32
    end = worker.answer("1")[-1]
    assert end["reason"] == "length"
    worker.text("2", "x" * 200, session="b", context=32)
    error = worker.error()
    assert (error["job"], error["error"]) == ("2", "ContextFull")
    assert f"{tokens + 1} tokens" in error["message"]
    worker.text("3", "x", session="c", context=1 << 20, max_tokens=1)
    assert worker.expect("text.start")["context"] == 96


def test_caches_are_kept_as_the_session_asked(worker: Peer) -> None:
    best = {}
    for form in ("f16", "q8"):
        worker.text(form, PROMPT, session=form, kv=form, max_tokens=2, top5=True)
        best[form] = [m["top5"][0][1] for m in worker.answer(form) if m["t"] == "text.token"]
    assert best["f16"] != best["q8"]
    assert best["f16"] == pytest.approx(best["q8"], abs=0.5)


def test_errors_concern_their_job_alone(worker: Peer) -> None:
    worker.text("1", PROMPT, model="another")
    assert worker.error()["error"] == "UnknownModel"
    worker.text("2", PROMPT, ids=[5000], session="q", max_tokens=4)
    error = worker.error()
    assert (error["job"], error["error"]) == ("2", "InvalidArgument")
    short = os.memfd_create("journal")
    worker.send("text", [short], job="3", session="s", model="m", settings={}, delivered=0)
    assert worker.error()["error"] == "InvalidArgument"
    os.close(short)
    fd = journal({"kind": "generate", "prompt": PROMPT, "settings": {}}, [1, 2])
    worker.send("text", [fd], job="4", session="s", model="m", settings={}, delivered=3)
    assert worker.error()["error"] == "InvalidArgument"
    worker.send("text", job="5", session="s", model="m", settings={}, delivered=0)
    assert worker.error()["error"] == "Internal"
    worker.send("text", [fd])
    assert worker.error()["error"] == "Internal"
    os.close(fd)
    worker.text("6", PROMPT, max_tokens=5)
    assert len(ids(worker.answer("6"))) == 5
    status, err = worker.close()
    assert status == 0
    assert PROMPT not in err
    assert "Traceback" not in err


def test_count_with_and_without_a_memfd(worker: Peer) -> None:
    worker.send("count", job="1", model="m", text="abc")
    short = worker.expect("count")
    assert short["job"] == "1"
    fd = os.memfd_create("text")
    os.write(fd, b"abc" * 40000)
    worker.send("count", [fd], job="2", model="m")
    os.close(fd)
    long = worker.expect("count")
    assert long["job"] == "2"
    assert long["tokens"] > 20000 * short["tokens"] // 3
    worker.send("count", job="3", model="nothing", text="abc")
    assert worker.error()["error"] == "UnknownModel"


def test_unloaded_when_its_last_job_is_over(worker: Peer) -> None:
    worker.text("1", PROMPT, max_tokens=60)
    worker.until("text.token", n=protocol.MAX_AHEAD - 1)
    worker.send("unload", model="m")
    worker.send("stats")
    assert worker.expect("stats")["models"] == ["m"]
    worker.send("ack", job="1", n=60)
    worker.expect("text.end")
    worker.send("close", session="s")
    worker.send("stats")
    assert worker.expect("stats")["models"] == []
    worker.text("2", PROMPT)
    assert worker.error()["error"] == "UnknownModel"


def test_idle_session_does_not_keep_a_model(worker: Peer, tiny: Path) -> None:
    worker.text("1", PROMPT, max_tokens=2)
    worker.answer("1")
    worker.send("unload", model="m")
    worker.send("stats")
    stats = worker.expect("stats")
    assert stats["models"] == []
    assert stats["jobs"] == 0
    assert stats["rss"] > 1 << 20
    assert stats["counters"]["submissions"] > 0
    worker.load(tiny)
    worker.text("2", PROMPT, max_tokens=2)
    assert len(ids(worker.answer("2"))) == 2


def test_closed_session_cancels_its_jobs(worker: Peer) -> None:
    worker.text("1", PROMPT, max_tokens=60)
    worker.text("2", PROMPT, max_tokens=60)
    worker.until("text.token", n=protocol.MAX_AHEAD - 1)
    worker.send("close", session="s")
    assert [worker.expect("text.end")["job"] for _ in range(2)] == ["1", "2"]


def test_inspect(worker: Peer, tiny: Path) -> None:
    with tiny.open("rb") as f:
        worker.send("inspect", [f.fileno()], job="1")
    assert worker.expect("inspected")["info"]["arch"] == "llama"
    fd = os.memfd_create("nothing")
    os.write(fd, b"GGUF but not really")
    worker.send("inspect", [fd], job="2")
    error = worker.error()
    assert (error["job"], error["error"]) == ("2", "BadModel")
    worker.send("load", [fd], model="bad", name="bad", kind="text", cache="")
    error = worker.error()
    assert (error["model"], error["error"]) == ("bad", "BadModel")
    os.close(fd)


def test_compiled_model_lies_where_load_says(peer: Start, tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "tiny.pvrm"
    info = peer().load(tiny, cache=str(cache))["info"]
    assert cache.exists()
    assert "uncached" not in info
    assert "uncached" in peer().load(tiny, cache=str(tmp_path / "no" / "tiny.pvrm"))["info"]


def test_peer_gone_in_the_middle(worker: Peer) -> None:
    worker.text("1", PROMPT, max_tokens=60)
    worker.until("text.token", n=1)
    assert worker.close() == (0, "")


def test_sigterm_ends_it_and_sigint_does_not(worker: Peer) -> None:
    worker.process.send_signal(signal.SIGINT)
    worker.send("ping", n=1)
    worker.expect("pong", n=1)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.ended() == (-signal.SIGTERM, "")


def test_a_job_goes_on_in_another_worker_with_its_caches(peer: Start, tiny: Path) -> None:
    first, second = peer(threads=1), peer(threads=1)
    for worker in (first, second):
        worker.load(tiny)
    second.text("0", "Hello", max_tokens=40)
    truth = [m["id"] for m in second.answer("0")[:-1]]
    first.text("1", "Hello", max_tokens=40)  # it is parked before its end
    while True:
        token = first.expect("text.token")
        first.send("ack", job="1", n=token["n"] + 1)
        if token["n"] == 4:
            break
    fd = os.memfd_create("kv", os.MFD_CLOEXEC)
    first.send("text.export", [fd], job="1", limit=1 << 20)
    seen = first.until("text.exported", job="1")
    ids = truth[:5] + [m["id"] for m in seen if m["t"] == "text.token"]
    assert ids == truth[: len(ids)]
    assert seen[-1]["bytes"] == os.fstat(fd).st_size > 0
    header = {"kind": "generate", "prompt": "Hello", "settings": {"max_tokens": 40}}
    record = journal(header, ids)
    second.send(
        "text", [record, fd], job="2", session="other", model="m", settings={},
        delivered=len(ids), carried=True,
    )  # fmt: skip
    rest = second.answer("2")
    assert ids + [m["id"] for m in rest[:-1]] == truth
    assert rest[-1]["stats"]["prefill_tokens"] == 1
    # One that is over, and one that may not take so much room.
    first.send("text.export", [fd], job="1", limit=1 << 20)
    first.text("3", "Hello", max_tokens=50)
    first.expect("text.token")
    first.send("text.export", [fd], job="3", limit=10)
    assert first.expect("text.exported", job="3")["bytes"] == 0
    for each in (record, fd):
        os.close(each)
