# SPDX-License-Identifier: Apache-2.0
"""Calls that answer when all is known (Embed, Classify, …): what ends them early, and what a
job may ask for at most.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pvrd.bus import BusError
from pvrd.bus_values import V, plain
from tests.pvrd.conftest import MANAGER, NAME, PATH, TEXT

pytestmark = pytest.mark.bus
HANG = {  # what the fake worker does not answer, or not soon
    "Embed": ("asa{sv}", [["hang"], {}]),
    "Classify": ("sasa{sv}", ["x", ["hang", "y"], {}]),
}


@pytest.fixture(scope="module")
def daemon(start: Any) -> Any:
    return start()


@pytest.fixture
def session(daemon: Any, caller: Any) -> str:
    caller.state("gpu")
    path: str = caller.open_text()
    return path


def asks(caller: Any, call: Any) -> None:
    """Makes a call whose answer nobody will have."""

    async def ask() -> None:
        asked = asyncio.ensure_future(call)
        asked.add_done_callback(lambda ended: ended.exception())
        await asyncio.sleep(0)

    caller.run(ask())


def asked(daemon: Any) -> list[str]:
    """Jobs that the fake worker was asked for and does not do."""
    words = [line.split() for line in daemon.text().splitlines()]
    return [line[1] for line in words if line[:1] == ["asked"]]


def broken_off(
    caller: Any, session: str, call: str, signature: str, body: Any, by: str, begun: Any
) -> str:
    """How a call ends when `by` is called once it has begun; the error's name and text."""

    async def both() -> str:
        connection = caller.connection
        asked = asyncio.ensure_future(connection.call(NAME, session, TEXT, call, signature, body))
        await asyncio.sleep(0)  # it is sent before the other
        while not begun():
            await asyncio.sleep(0.01)
        await connection.call(NAME, session, TEXT, by)
        try:
            await asyncio.wait_for(asked, 10)
        except BusError as e:
            return f"{e.name.rpartition('.')[2]}: {e.message}"
        return "it answered"

    ended: str = caller.run(both())
    return ended


@pytest.mark.parametrize("call", HANG)
@pytest.mark.parametrize(
    ("by", "why"), [("Cancel", "the job was cancelled"), ("Close", "the session was closed")]
)
def test_a_question_ends_with_cancel_and_with_its_session(
    daemon: Any, session: str, caller: Any, until: Any, call: str, by: str, why: str
) -> None:
    before = plain(caller.call("GetStatistics").body[0])["jobs"]
    count = len(asked(daemon))
    ended = broken_off(caller, session, call, *HANG[call], by, lambda: asked(daemon)[count:])
    assert ended == f"Cancelled: {why}"
    job = asked(daemon)[count]
    until(lambda: f"cancelled {job}\n" in daemon.text(), "the worker's order to end it")
    after = plain(caller.call("GetStatistics").body[0])["jobs"]
    assert (after["running"], after["cancelled"]) == (0, before["cancelled"] + 1)


def test_a_question_ends_with_its_caller(daemon: Any, callers: Any, until: Any) -> None:
    stays, leaves = callers(), callers()
    stays.state("gpu")
    path = leaves.open_text()

    count = len(asked(daemon))
    asks(leaves, leaves.connection.call(NAME, path, TEXT, "Embed", *HANG["Embed"]))
    until(lambda: asked(daemon)[count:])
    job = asked(daemon)[count]
    leaves.connection.close()
    until(lambda: f"cancelled {job}\n" in daemon.text(), "the worker's order to end it")


def test_a_picture_ends_with_its_caller(
    daemon: Any, callers: Any, until: Any, tmp_path: Path
) -> None:
    stays, leaves = callers(), callers()
    stays.state("gpu")
    (tmp_path / "picture").write_bytes(b"hang")
    count = len(asked(daemon))
    with (tmp_path / "picture").open("rb") as file:
        asks(leaves, leaves.connection.call(
            NAME, PATH, MANAGER, "Upscale", "ha{sv}", [0, {}], [file.fileno()]
        ))  # fmt: skip
        until(lambda: asked(daemon)[count:])
    job = asked(daemon)[count]
    leaves.connection.close()
    until(lambda: f"cancelled {job}\n" in daemon.text(), "the worker's order to end it")
    assert plain(stays.call("GetStatistics").body[0])["jobs"]["running"] == 0


def test_a_trace_ends_with_its_caller(daemon: Any, callers: Any, until: Any) -> None:
    stays, leaves = callers(), callers()
    stays.state("gpu")
    short = [stays.options(seconds=0.01)]
    call = (NAME, PATH, MANAGER, "Trace", "a{sv}", [leaves.options(seconds=600)], (), None)
    asks(leaves, leaves.connection.call(*call))
    leaves.call("GetConfig")  # answered: what it asked before is under way
    assert stays.fails("Trace", "a{sv}", short)[0] == "Busy"
    leaves.connection.close()

    def traced() -> bool:
        try:
            stays.call("Trace", "a{sv}", short).fds.close()
        except BusError:
            return False
        return True

    until(traced, "the end of the trace whose caller left")


def test_counting_ends_with_its_caller(daemon: Any, callers: Any, until: Any) -> None:
    stays, leaves, looks = callers(), callers(), callers()
    looks.state("gpu")

    def running() -> int:
        return int(plain(looks.call("GetStatistics").body[0])["jobs"]["running"])

    # Who stays asked first: a method's time would end that one's call before the other's.
    for number, caller in enumerate((stays, leaves), 1):
        path = caller.open_text()
        asks(caller, caller.connection.call(NAME, path, TEXT, "CountTokens", "s", ["hang"]))
        until(lambda wanted=number: running() == wanted)
    leaves.connection.close()
    until(lambda: running() < 2, "the end of the job whose caller left")
    assert running() == 1, "the other one is still under way"


def test_adding_a_model_ends_with_its_caller(
    daemon: Any, callers: Any, until: Any, tmp_path: Path
) -> None:
    stays, leaves = callers(), callers()
    stays.state("gpu")
    file, sound = tmp_path / "model", tmp_path / "sound"
    file.write_bytes(b"GGUF hang")
    sound.write_bytes(b"GGUF and no more")
    models = daemon.folder / "state" / "pvrd" / "models"
    count, fds = len(asked(daemon)), daemon.fds()
    with file.open("rb") as opened:
        body = [0, "new", {}]
        asks(leaves, leaves.connection.call(
            NAME, PATH, MANAGER, "AddModel", "hsa{sv}", body, [opened.fileno()], None
        ))  # fmt: skip
        until(lambda: asked(daemon)[count:])
    assert list(models.glob(".new-*"))
    leaves.connection.close()
    until(lambda: not list(models.glob(".new-*")), "the end of what was added")
    until(lambda: daemon.fds() <= fds, "the end of its files")
    with sound.open("rb") as opened:
        stays.call("AddModel", "hsa{sv}", body, [opened.fileno()])
    stays.call("RemoveModel", "s", ["new"])


def test_an_extract_that_is_cancelled_says_so(session: str, caller: Any) -> None:
    body = ["slow", "{}", caller.options(max_tokens=2000)]
    ended = broken_off(caller, session, "Extract", "ssa{sv}", body, "Cancel", lambda: True)
    assert ended == "Cancelled: the job was cancelled"


@pytest.mark.parametrize("by", ["Cancel", "Close"])
def test_a_job_that_is_ended_in_the_same_breath(
    daemon: Any, caller: Any, lines: Any, by: str
) -> None:
    """The daemon reads both calls at once: the job ends before its first step."""

    async def ended(session: str, beside: int) -> dict[str, Any]:
        def call(path: str, interface: str, member: str, *more: Any) -> Any:
            return asyncio.ensure_future(
                caller.connection.call(NAME, path, interface, member, *more)
            )

        calls = [call(PATH, MANAGER, "GetConfig") for _ in range(beside)]
        body = ["x", caller.options(max_tokens=2000)]
        generate = call(session, TEXT, "Generate", "sa{sv}", body)
        calls.append(call(session, TEXT, by))
        reply = await generate
        await asyncio.gather(*calls)
        return dict(lines(reply.fds.take(0)).rest()[-1])

    caller.state("gpu")
    for n in range(30):
        session = caller.open_text()
        end = caller.run(ended(session, n % 5))
        if by == "Cancel":
            assert (end["type"], end["reason"]) == ("end", "cancelled")
            os.close(caller.generate(session, "x", max_tokens=1))  # it is not busy
            caller.call("Close", path=session, interface=TEXT)
        else:
            assert (end["type"], end["error"]) == ("error", "Cancelled")


def test_an_extract_has_no_text_that_ends_it_early(session: str, caller: Any) -> None:
    body = ["x", "{}", caller.options(stop=["{"])]
    with pytest.raises(BusError, match="there is no option 'stop'"):
        caller.call("Extract", "ssa{sv}", body, path=session, interface=TEXT)


def test_the_largest_settings_reach_the_worker(session: str, caller: Any, lines: Any) -> None:
    """A schema of 64 KiB and all that may stand beside it are more than a worker's message has."""
    schema = json.dumps({"enum": ["a" * ((1 << 16) - 14)]})
    assert len(schema) == 1 << 16
    asked = caller.options(max_tokens=3, schema=schema, stop=["\x01" * 256] * 8)
    asked["logit_bias"] = V("a{ud}", {10**9 + i: -999.123456789 for i in range(1024)})
    for call, signature, body in (
        ("Generate", "sa{sv}", ["x", asked]),
        ("Chat", "aa{ss}a{sv}", [[{"role": "user", "content": "x"}], asked]),
    ):
        reply = caller.call(call, signature, body, path=session, interface=TEXT)
        end = lines(reply.fds.take(0)).rest()[-1]
        assert (end["type"], end["tokens"]) == ("end", 3)
