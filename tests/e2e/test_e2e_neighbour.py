# SPDX-License-Identifier: Apache-2.0
"""Holds, idle workers and low precision with the real workers and a GPU in software."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.buses import until
from tests.daemons import PROMPT, Daemon
from tests.pvrd.power import power_profiles

pytestmark = pytest.mark.bus

Start = Callable[..., Daemon]
TOKENS = 60


def ids(events: list[dict[str, Any]]) -> list[int]:
    found = [e for e in events if e["type"] == "token" and "id" in e]
    assert [e["n"] for e in found] == list(range(len(found)))
    return [e["id"] for e in found]


@pytest.mark.gpu
def test_a_hold_moves_an_answer_to_the_cpu_and_gives_the_memory_back(daemon: Start) -> None:
    # Slow, so that the hold comes while there are tokens left.
    running = daemon({"gpu.allow_software": True, "debug.faults": ["gpu:slow:20"]})
    settings = {"model": "tiny", "context": 128}
    with running.client() as client, running.client() as other:
        gpu = running.ready(client, "gpu")
        with client.open_text({**settings, "device": "cpu"}) as alone:
            wanted = ids(list(alone.generate(PROMPT, {"max_tokens": TOKENS})))
        with client.open_text({**settings, "priority": 5}) as session:
            events, hold = [], -1
            for event in session.generate(PROMPT, {"max_tokens": TOKENS}):
                events.append(event)
                if event.get("n") == 10 and hold < 0:
                    hold = other.hold("a game")
            assert ids(events) == wanted
            assert next(e["device"] for e in events if "device" in e) == "gpu"
            assert events[-1]["device"] == "cpu"
            assert any("a game" in e.get("reason", "") for e in events if e["type"] == "device")
            until(lambda: not os.path.exists(f"/proc/{gpu['pid']}"), "the memory's release")
            asleep = running.device(other, "gpu")
            assert (asleep["state"], asleep["present"]) == ("asleep", True)
            assert asleep["name"] == gpu["name"]
            os.close(hold)
            running.ready(other, "gpu", gpu["generation"] + 1)
            again = list(session.generate(PROMPT, {"max_tokens": TOKENS}))
            assert again[-1]["device"] == "gpu"
            assert ids(again) == wanted


@pytest.mark.gpu
def test_idle_workers_end_and_come_back(daemon: Start) -> None:
    running = daemon(
        {"gpu.allow_software": True, "workers.idle_s": 0.5, "models.keep_s": 0.2}
    )  # fmt: skip
    with running.client() as client:

        def asleep() -> bool:
            return all(d["state"] == "asleep" for d in client.properties()["Devices"])

        until(asleep, "idle workers asleep")
        assert client.properties()["State"] == "gpu"
        with client.open_text({"model": "tiny", "context": 128}) as session:
            events = list(session.generate(PROMPT, {"max_tokens": 5}))
        assert events[0]["device"] == events[-1]["device"] == "gpu"
        until(asleep, "idle workers asleep again")


def test_short_power_takes_four_bits_compiled_once(
    daemon: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with power_profiles() as power:
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", power.address)
        running = daemon({})
        with running.client() as client:
            running.ready(client, "cpu")

            def answer() -> tuple[dict[str, Any], list[int]]:
                with client.open_text({"model": "tiny", "device": "cpu", "context": 128}) as s:
                    events = list(s.generate(PROMPT, {"max_tokens": TOKENS}))
                assert events[-1]["type"] == "end"
                return events[0], ids(events)

            until(lambda: power.saver(False), "the profiles")
            start, full = answer()
            assert start["precision"] == "full"
            power.saver(True)
            until(lambda: client.properties()["Decision"]["precision"] == "low", "low precision")
            start, low = answer()
            assert (start["precision"], len(low)) == ("low", TOKENS)
            assert start["precision_reason"] == "the power saver profile is on"
            files = {p.name: p.stat() for p in (tmp_path / "cache" / "pvrd").glob("*.pvrm")}
            (narrow,) = [name for name in files if name.endswith("-q4.pvrm")]
            assert files[narrow].st_size < files[narrow.replace("-q4", "")].st_size
            assert answer()[1] == low
            cache = tmp_path / "cache" / "pvrd"
            assert (cache / narrow).stat().st_mtime_ns == files[narrow].st_mtime_ns
            power.saver(False)
            until(lambda: client.properties()["Decision"]["precision"] == "full", "full precision")
            start, again = answer()
            assert (start["precision"], again) == ("full", full)
