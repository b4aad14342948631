# SPDX-License-Identifier: Apache-2.0
"""Text over the bus, with fake workers: the stream, and that a dying worker costs no token."""

from __future__ import annotations

import os
import signal
import struct
from typing import Any

import pytest

from pvrd.bus import BusError
from pvrd.bus_values import plain

pytestmark = pytest.mark.bus
TEXT = "org.pvrd.Pvrd1.TextSession"


@pytest.fixture(scope="module")
def daemon(start: Any) -> Any:
    return start()


@pytest.fixture
def session(daemon: Any, caller: Any) -> str:
    caller.state("gpu")
    path: str = caller.open_text()
    return path


def check(lines: list[dict[str, Any]], count: int) -> None:
    """Every token once, in order, nothing torn or lost."""
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    assert {line["v"] for line in lines} == {1}
    tokens = [line for line in lines if line["type"] == "token" and "id" in line]
    assert [t["n"] for t in tokens] == list(range(count))
    assert [t["id"] for t in tokens] == [100 + 7 * n for n in range(count)]
    assert [line["type"] for line in lines].count("start") == 1
    assert [line["type"] for line in lines if line["type"] in ("end", "error")] == ["end"]
    assert lines[-1]["type"] == "end"


def test_stream(session: str, caller: Any, lines: Any) -> None:
    got = lines(caller.generate(session, "hello there", max_tokens=20, seed=7, top5=True)).rest()
    check(got, 20)
    start, first, end = got[0], got[1], got[-1]
    assert start["model"] == "fake-text"
    assert (start["prompt_tokens"], start["context"]) == (2, 2048)
    assert (start["device"], start["device_name"], start["seed"]) == ("gpu", "Fake gpu", 7)
    assert first["text"] == "w0 "
    assert first["top5"] == [[100, 1.5]]
    assert (end["reason"], end["text"], end["tokens"], end["restarts"]) == ("length", "end", 20, 0)
    assert end["stats"]["decode_tokens"] == 20


def test_a_session_is_made_ready_before_its_prompt(start: Any, caller: Any, until: Any) -> None:
    daemon = start()
    caller.state("gpu")
    caller.open_text(context=64, kv="q8", priority=7)
    until(lambda: " 64 q8 7\n" in daemon.text(), "the worker's order to prepare")
    (line,) = [line for line in daemon.text().splitlines() if line.startswith("prepare")]
    assert line.split()[1].startswith("s")


def test_chances_of_tokens(session: str, caller: Any, lines: Any) -> None:
    got = lines(caller.generate(session, "hello", max_tokens=3, logprobs=1, top5=False)).rest()
    check(got, 3)
    assert (got[1]["logprob"], got[1]["logprobs"]) == (-0.5, [[100, -0.5]])


def test_tokens_in_doubt_are_named(session: str, caller: Any, lines: Any) -> None:
    got = lines(caller.generate(session, "suspect:5", max_tokens=9)).rest()
    check(got, 9)
    (at,) = [i for i, line in enumerate(got) if line["type"] == "suspect"]
    assert got[at - 1]["n"] == 4
    wanted = {"since": 3, "kernel": "matvec.q4", "reason": "half of y was wrong", "device": "gpu"}
    assert wanted.items() <= got[at].items()
    (gpu,) = [d for d in caller.get("Devices") if d["kind"] == "gpu"]
    assert gpu["quarantined"] == {"matvec.q4": "half of y was wrong"}


def test_chat_and_count(session: str, caller: Any, lines: Any) -> None:
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    body = [talk, caller.options(max_tokens=3)]
    interface = "org.pvrd.Pvrd1.TextSession"
    reply = caller.call("Chat", "aa{ss}a{sv}", body, path=session, interface=interface)
    check(lines(reply.fds.take(0)).rest(), 3)
    for text in ("a b c", "\x01 " * 4000, "word " * 20000):
        reply = caller.call("CountTokens", "s", [text], path=session, interface=interface)
        assert reply.body == [len(text.split())]


def test_answers_that_are_no_stream(session: str, caller: Any) -> None:
    def ask(method: str, signature: str, *body: Any) -> Any:
        return caller.call(method, signature, list(body), path=session, interface=TEXT)

    def done() -> int:
        return int(plain(caller.call("GetStatistics").body[0])["jobs"]["done"])

    before = done()
    reply = ask("Embed", "asa{sv}", ["a", "b"], caller.options(pooling="last"))
    fd = reply.fds.take(reply.body[0])
    assert struct.unpack("<4f", os.pread(fd, 100, 0)) == pytest.approx((0.6, 0.8, 0.6, 0.8))
    os.close(fd)
    reply = ask("Classify", "sasa{sv}", "text", ["x", "y"], {})
    assert reply.body == ["y", {"x": 0.5, "y": 0.5}]
    assert ask("Extract", "ssa{sv}", "text", "{}", caller.options(max_tokens=2)).body == [
        "w0 w1 end"
    ]
    assert done() == before + 3
    bad: list[Any] = [
        ("Embed", "asa{sv}", [], {}), ("Embed", "asa{sv}", [""], {}),
        ("Embed", "asa{sv}", ["a"], caller.options(pooling="max")),
        ("Classify", "sasa{sv}", "t", ["x"], {}), ("Classify", "sasa{sv}", "t", ["x", "x"], {}),
        ("Classify", "sasa{sv}", " ", ["x", "y"], {}), ("Extract", "ssa{sv}", "t", "", {}),
        ("Extract", "ssa{sv}", "t", "{}", caller.options(mirostat=2)),
    ]  # fmt: skip
    for call in bad:
        with pytest.raises(BusError) as e:
            ask(*call)
        assert e.value.name.endswith(".InvalidArgument"), call


def test_an_extract_that_is_cut_off(session: str, caller: Any) -> None:
    body = ["cut", "{}", caller.options(max_tokens=2)]
    with pytest.raises(BusError, match="max_tokens"):
        caller.call("Extract", "ssa{sv}", body, path=session, interface=TEXT)


def test_ready_and_properties(session: str, caller: Any, until: Any) -> None:
    interface = "org.pvrd.Pvrd1.TextSession"
    until(lambda: caller.get("Ready", session, interface))
    assert caller.get("Progress", session, interface) == 1.0
    assert caller.get("Device", session, interface) == "gpu"
    assert caller.get("Model", session, interface) == "fake-text"
    assert caller.get("Error", session, interface) == ""


def test_long_text_comes_in_lines(session: str, caller: Any, lines: Any) -> None:
    got = lines(caller.generate(session, "wide", max_tokens=3)).rest()
    check(got, 3)
    for n in range(3):
        text = "".join(x["text"] for x in got if x["type"] == "token" and x["n"] == n)
        assert text == f"w{n} " + "é\x01" * 1500


@pytest.mark.parametrize("fault", ["die:0", "die:7", "stop:5", "nonsense:9"])
def test_worker_dies(fault: str, start: Any, callers: Any, lines: Any) -> None:
    # No shorter: a worker that a busy machine lets wait would be taken for one that hangs.
    start({"deadlines.slice_s": 2.0, "deadlines.ping_s": 0.1} if "stop" in fault else {})
    caller = callers()
    caller.state("gpu")
    session = caller.open_text()
    got = lines(caller.generate(session, f"please {fault}", max_tokens=40)).rest()
    check(got, 40)
    moves = [line for line in got if line["type"] == "device"]
    if fault != "die:0":
        assert [m["device"] for m in moves] == ["cpu"]
        assert moves[0]["restarts"] == 1
        assert moves[0]["reason"]
    assert (got[-1]["device"], got[-1]["restarts"]) == ("cpu", 1)
    # The GPU comes back, and new work goes there.
    caller.state("gpu")
    got = lines(caller.generate(session, "again", max_tokens=5)).rest()
    check(got, 5)
    assert got[0]["device"] == "gpu"


def test_kill_from_outside(start: Any, callers: Any, lines: Any) -> None:
    start()
    caller = callers()
    caller.state("gpu")
    gpu = next(d for d in caller.get("Devices") if d["kind"] == "gpu")
    stream = lines(caller.generate(caller.open_text(), "slow", max_tokens=200))
    got = [stream.next() for _ in range(10)]
    os.kill(gpu["pid"], signal.SIGKILL)
    got += stream.rest()
    check(got, 200)
    assert got[-1]["device"] == "cpu"


def test_a_job_that_kills_three_workers_fails(start: Any, callers: Any, lines: Any) -> None:
    start()
    caller = callers()
    caller.state("gpu")
    session = caller.open_text()
    got = lines(caller.generate(session, "die-always:2", max_tokens=9)).rest()
    assert got[-1]["type"] == "error"
    assert got[-1]["error"] == "DeviceLost"
    assert [x["n"] for x in got if x["type"] == "token"] == [0, 1]
    check(lines(caller.generate(session, "fine", max_tokens=9)).rest(), 9)


def test_gpu_without_memory_falls_back(start: Any, callers: Any, lines: Any) -> None:
    start()
    caller = callers()
    caller.state("gpu")
    got = lines(caller.generate(caller.open_text(), "oom:gpu", max_tokens=4)).rest()
    check(got, 4)
    assert got[-1]["device"] == "cpu"
    got = lines(caller.generate(caller.open_text(device="gpu"), "oom:gpu", max_tokens=4)).rest()
    assert (got[-1]["type"], got[-1]["error"]) == ("error", "OutOfMemory")


def test_busy_cancel_and_gone_reader(start: Any, callers: Any, lines: Any, until: Any) -> None:
    start()
    caller = callers()
    caller.state("gpu")
    session = caller.open_text()
    interface = "org.pvrd.Pvrd1.TextSession"
    stream = lines(caller.generate(session, "slow", max_tokens=100000))
    stream.next()
    name, _ = caller.fails("Generate", "sa{sv}", ["x", {}], path=session, interface=interface)
    assert name == "Busy"
    caller.call("Cancel", path=session, interface=interface)
    got = stream.rest()
    assert got[-1]["type"] == "end"
    assert got[-1]["reason"] == "cancelled"
    # A reader that goes away ends the job: the session is free again.
    os.close(caller.generate(session, "slow", max_tokens=100000))

    def free() -> bool:
        try:
            os.close(caller.generate(session, "x", max_tokens=1))
        except Exception:
            return False
        return True

    until(free)


def test_slow_reader(start: Any, callers: Any, lines: Any) -> None:
    start({"limits.slow_reader_s": 0.3})
    caller = callers()
    caller.state("gpu")
    session = caller.open_text()
    reader = lines(caller.generate(session, "never read", max_tokens=100000))
    jobs = 1
    while jobs:  # the job ends although nobody reads
        statistics = caller.call("GetStatistics").body[0]
        jobs = statistics["jobs"].value["running"].value
    got = reader.rest()
    assert (got[-1]["type"], got[-1]["error"]) == ("error", "SlowReader")
    assert [x["n"] for x in got if x["type"] == "token"] == list(range(len(got) - 2))


def test_parked_reader_gets_everything(start: Any, callers: Any, lines: Any) -> None:
    start()
    caller = callers()
    caller.state("gpu")
    stream = lines(caller.generate(caller.open_text(), "x", max_tokens=3000))
    # Far more than a pipe holds; reading begins only now.
    check(stream.rest(), 3000)


def test_model_that_does_not_load(start: Any, callers: Any, lines: Any, until: Any) -> None:
    start()
    caller = callers()
    session = caller.open_text(model="broken")
    interface = "org.pvrd.Pvrd1.TextSession"
    until(lambda: caller.get("Error", session, interface).startswith("BadModel"))
    got = lines(caller.generate(session, "x")).rest()
    assert [(x["type"], x["error"]) for x in got] == [("error", "BadModel")]


def test_shutdown(start: Any, callers: Any, lines: Any) -> None:
    daemon = start({"limits.shutdown_s": 0.3})
    caller = callers()
    caller.state("gpu")
    stream = lines(caller.generate(caller.open_text(), "slow", max_tokens=100000))
    stream.next()
    assert daemon.stop() == 0
    got = stream.rest()
    assert (got[-1]["type"], got[-1]["error"]) == ("error", "ShuttingDown")


def test_a_hold_moves_a_job_at_a_token(start: Any, callers: Any, lines: Any, until: Any) -> None:
    start({"sensors.system": False})
    caller = callers()
    caller.state("gpu")
    session = caller.open_text()
    # More than come before a busy machine has started the GPU's worker again.
    stream = lines(caller.generate(session, "slow", max_tokens=6000))
    got = [stream.next() for _ in range(5)]
    reply = caller.call("Hold", "sa{sv}", ["a game", {}])
    hold = reply.fds.take(reply.body[0])
    while got[-1]["type"] != "device":
        got.append(stream.next())
    assert (got[-1]["device"], got[-1]["restarts"]) == ("cpu", 0)
    assert "a game" in got[-1]["reason"]
    got += [stream.next() for _ in range(5)]
    os.close(hold)
    while got[-1]["type"] != "device":
        got.append(stream.next())
    assert (got[-1]["device"], got[-1]["reason"]) == ("gpu", "the GPU is free again")
    got += [stream.next() for _ in range(5)]
    caller.call("Cancel", path=session, interface=TEXT)
    got += stream.rest()
    check(got, sum(line["type"] == "token" and "id" in line for line in got))
    assert [line["device"] for line in got if line["type"] == "device"] == ["cpu", "gpu"]
    assert (got[-1]["device"], got[-1]["restarts"]) == ("gpu", 0)

