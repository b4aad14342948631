# SPDX-License-Identifier: Apache-2.0
"""Calls that answer when all is known (Embed, Classify, Extract): what ends them early, and what a
job may ask for at most.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pvrd.bus import BusError
from pvrd.bus_values import V, plain

pytestmark = pytest.mark.bus
NAME = "org.pvrd.Pvrd1"
TEXT = "org.pvrd.Pvrd1.TextSession"
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


def broken_off(caller: Any, session: str, call: str, signature: str, body: Any, by: str) -> str:
    """How a call ends when `by` is called once its job runs; the error's name and text."""

    async def both() -> str:
        connection = caller.connection
        asked = asyncio.ensure_future(connection.call(NAME, session, TEXT, call, signature, body))
        while not plain((await connection.call(
            NAME, "/org/pvrd/Pvrd1", f"{NAME}.Manager", "GetStatistics"
        )).body[0])["jobs"]["running"]:  # fmt: skip
            pass
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
    assert broken_off(caller, session, call, *HANG[call], by) == f"Cancelled: {why}"
    job = daemon.text().rpartition("asked ")[2].split()[0]
    until(lambda: f"cancelled {job}\n" in daemon.text(), "the worker's order to end it")
    after = plain(caller.call("GetStatistics").body[0])["jobs"]
    assert (after["running"], after["cancelled"]) == (0, before["cancelled"] + 1)


def test_a_question_ends_with_its_caller(daemon: Any, callers: Any, until: Any) -> None:
    stays, leaves = callers(), callers()
    stays.state("gpu")
    path = leaves.open_text()

    async def ask() -> None:
        asked = leaves.connection.call(NAME, path, TEXT, "Embed", *HANG["Embed"])
        leaves.asked = asyncio.ensure_future(asked)
        await asyncio.sleep(0)

    leaves.run(ask())
    until(lambda: plain(stays.call("GetStatistics").body[0])["jobs"]["running"] == 1)
    leaves.connection.close()
    until(lambda: plain(stays.call("GetStatistics").body[0])["jobs"]["running"] == 0)
    with pytest.raises(BusError):
        leaves.run(leaves.asked)


def test_an_extract_that_is_cancelled_says_so(session: str, caller: Any) -> None:
    body = ["slow", "{}", caller.options(max_tokens=2000)]
    ended = broken_off(caller, session, "Extract", "ssa{sv}", body, "Cancel")
    assert ended == "Cancelled: the job was cancelled"


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
