# SPDX-License-Identifier: Apache-2.0
"""A text that is being written moves between the devices while somebody holds the GPU free."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pvrd.client import Client, TextSession
from tests.buses import until
from tests.daemons import PROMPT, Daemon
from tests.e2e.test_e2e_text import Event, text, tokens

pytestmark = pytest.mark.bus
Start = Callable[..., Daemon]
# Time for a hold to come and go, and for a GPU worker to start.
SLOW = {"gpu.allow_software": True, "debug.faults": ["gpu:slow:20", "cpu:slow:60"]}
TOKENS = 110


def session(client: Client) -> TextSession:
    return client.open_text({"model": "tiny", "context": 200})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, models: Path) -> list[Event]:
    with (
        Daemon(tmp_path_factory.mktemp("undisturbed"), models, {}) as daemon,
        daemon.client() as client,
        session(client) as where,
    ):
        return list(where.generate(PROMPT, {"max_tokens": TOKENS}))


@pytest.mark.gpu
def test_a_hold_moves_a_text_and_its_end_brings_it_back(
    daemon: Start, undisturbed: list[Event]
) -> None:
    running = daemon(SLOW)
    with running.client() as client, session(client) as where:
        running.ready(client, "gpu")
        until(lambda: where.properties()["Ready"], "the model")
        events: list[Event] = []
        held = -1
        with running.client() as other:
            for event in where.generate(PROMPT, {"max_tokens": TOKENS}):
                events.append(event)
                if event.get("n") == 10:
                    held = other.hold("a test")
                elif event["type"] == "device" and event["device"] == "cpu":
                    os.close(held)
    assert tokens(events) == tokens(undisturbed)
    assert text(events) == text(undisturbed)
    named = [e["device"] for e in events if e["type"] in ("start", "device")]
    assert named[:2] == ["gpu", "cpu"]
    assert named in (["gpu", "cpu"], ["gpu", "cpu", "gpu"])
    reasons = [e["reason"] for e in events if e["type"] == "device"]
    assert "a test" in reasons[0]
    assert events[-1]["type"] == "end"
    # It left at a token, before the worker was ended.
    assert events[-1]["restarts"] == 0
    # What was computed on the GPU was not computed again: one token was fed.
    assert events[-1]["stats"]["prefill_tokens"] == 1
