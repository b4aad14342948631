# SPDX-License-Identifier: Apache-2.0
"""The examples in Python with a real daemon and the shipped model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.buses import ROOT
from tests.daemons import Daemon

pytestmark = [pytest.mark.bus, pytest.mark.long]
ASSISTANT = ROOT / "examples/assistant"


def run(daemon: Daemon, *command: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PVRD_BUS": daemon.address, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, input=text, text=True,
        capture_output=True, check=True, timeout=600,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "intents", "slots"), [("utterances", 0.93, 0.9), ("fresh", 0.86, 0.75)]
)
def test_assistant(daemon: Callable[..., Daemon], name: str, intents: float, slots: float) -> None:
    running = daemon({"models.paths": []})
    command = [ASSISTANT / "assistant.py", "--device", "cpu", "--json"]
    with running.client():  # it answers
        done = run(running, *command, "--evaluate", ASSISTANT / f"{name}.toml")
    record = json.loads(done.stdout)
    # A little below what was measured: another instruction set adds in another order.
    assert record["intent_accuracy"] >= intents
    assert record["slot_accuracy"] >= slots


def test_summary_of_a_text_longer_than_the_context(daemon: Callable[..., Daemon]) -> None:
    running = daemon({"models.paths": []})
    text = (ROOT / "benchmarks/data/opticks-20k.txt").read_text(encoding="utf-8")[:9000]
    script = ROOT / "examples/summarize.py"
    with running.client():
        done = run(running, script, "--context", "768", "--words", "40", "-", text=text)
    assert "piece 2" in done.stderr
    assert 40 < len(done.stdout) < 1500
