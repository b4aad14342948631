# SPDX-License-Identifier: Apache-2.0
"""Low precision while power is short: which form of a model a text job gets, and that it stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pvrd.power import Power, power_profiles

pytestmark = pytest.mark.bus


@pytest.fixture
def power() -> Iterator[Power]:
    with power_profiles() as mocked:
        yield mocked


def test_new_text_jobs_take_four_bits_while_power_is_short(
    start: Any, caller: Any, lines: Any, until: Any, power: Power, tmp_path: Path
) -> None:
    models = tmp_path / "data" / "pvrd" / "models"
    models.mkdir(parents=True)
    (models / "wide.gguf").write_bytes(b"GGUF wide")
    (models / "twin.gguf").write_bytes(b"GGUF wide, too")
    (models / "twin.q4.gguf").write_bytes(b"GGUF of another file")
    daemon = start({"sensors.system": True}, folder=tmp_path, DBUS_SYSTEM_BUS_ADDRESS=power.address)
    caller.state("gpu")
    until(lambda: power.saver(False), "the profiles")

    def first(session: str, **options: Any) -> tuple[Any, dict[str, Any]]:
        stream = lines(caller.generate(session, "hello slow", **options))
        return stream, stream.next()

    wide = caller.open_text(model="wide")
    early, said = first(wide, max_tokens=400)
    assert said["precision"] == "full"
    assert "precision_reason" not in said
    power.saver(True)
    until(lambda: caller.get("Decision")["precision"] == "low", "low precision")
    for name, precision, model in (
        ("wide", "low", "wide"), ("fake-text", "full", "fake-text"), ("twin", "low", "twin.q4"),
    ):  # fmt: skip
        stream, said = first(caller.open_text(model=name), max_tokens=3)
        assert (said["precision"], said["model"]) == (precision, model), name
        if precision == "low":
            assert said["precision_reason"] == "the power saver profile is on"
        assert stream.rest()[-1]["type"] == "end"
    rest = early.rest()
    assert rest[-1]["type"] == "end"
    assert [line["n"] for line in rest if line["type"] == "token"] == list(range(400))
    assert not [line for line in rest if line["type"] == "device"], "nothing changed in an answer"
    # The same session: the next job takes the form that fits then.
    stream, said = first(wide, max_tokens=3)
    assert said["precision"] == "low"
    stream.rest()
    power.saver(False)
    until(lambda: caller.get("Decision")["precision"] == "full", "full precision")
    stream, said = first(wide, max_tokens=3)
    assert said["precision"] == "full"
    stream.rest()
    assert "precision low" in daemon.text()
