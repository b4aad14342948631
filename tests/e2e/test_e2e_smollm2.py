# SPDX-License-Identifier: Apache-2.0
"""A real model over the bus, found by itself: llama.cpp's greedy answers, also with a worker that
dies on the way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pvrd.client import Client
from tests.buses import ROOT
from tests.daemons import Daemon

pytestmark = pytest.mark.bus

KNOWN = json.loads((ROOT / "tests/data/smollm2.json").read_text())["prompts"]
MODEL = "smollm2-135m-instruct"


def ask(client: Client, known: dict[str, Any]) -> tuple[list[int], str, int]:
    """Ids and text of a greedy answer on the CPU, and how many workers died under it."""
    with client.open_text({"model": MODEL, "device": "cpu", "context": 512}) as session:
        messages = [{"role": "user", "content": known["user"]}]
        settings = {"temperature": 0, "max_tokens": len(known["ids"])}
        events = list(session.chat(messages, settings))
    text = "".join(str(e.get("text", "")) for e in events)
    return [e["id"] for e in events if "id" in e], text, events[-1]["restarts"]


def test_reference_answers(daemon: Callable[..., Daemon]) -> None:
    # The second answer is interrupted: 8 tokens and the prompt's slice come before it.
    running = daemon({"debug.faults": ["cpu:device_lost:30"], "models.paths": []})
    with running.client() as client:
        for restarts, known in enumerate(KNOWN):
            assert ask(client, known) == (known["ids"], known["text"], restarts)


def test_answers_that_are_no_text(daemon: Callable[..., Daemon]) -> None:
    schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    )
    running = daemon({"models.paths": []})
    with (
        running.client() as client,
        client.open_text({"model": MODEL, "device": "cpu", "context": 512}) as session,
    ):
        found = json.loads(session.extract("Anna is 31 years old.", schema, {}))
        assert found == {"name": "Anna", "age": 31}
        labels = ["food", "weather", "football"]
        label, scores = session.classify("It will rain all day tomorrow.", labels, {})
        assert label == "weather"
        assert sum(scores.values()) == pytest.approx(1)
        texts = ["The cat sleeps on the sofa.", "A kitten naps on a couch.", "Shares fell by 3 %."]
        cat, kitten, shares = session.embed(texts, {})
        assert sum(a * a for a in cat) == pytest.approx(1, abs=1e-5)

        def alike(a: list[float], b: list[float]) -> float:
            return sum(x * y for x, y in zip(a, b, strict=True))

        assert alike(cat, kitten) > max(alike(cat, shares), alike(kitten, shares))
