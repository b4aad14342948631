# SPDX-License-Identifier: Apache-2.0
"""Snapshots as lines of JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from pvrd.governor import Snapshot
from pvrd.sensors import recording


def test_there_and_back() -> None:
    snapshot = Snapshot(
        time_s=3.5, canary=1.25, battery=19.0, on_battery=True, sleeping=True, idle=False,
        holds=("a game", "Ünïcode"), sources={"battery": "UPower"},
    )  # fmt: skip
    line = recording.dump(snapshot)
    assert "\n" not in line
    assert recording.load(line) == snapshot
    assert recording.load(recording.dump(snapshot, sources=False)).sources == {}
    assert recording.dump(Snapshot(time_s=0.0, unknown={"idle": "why"})) == '{"time_s": 0.0}'


@pytest.mark.parametrize(
    ("line", "why"),
    [("[]", "JSON object"), ("{}", "time_s"), ('{"time_s": "now"}', "time_s"), ("{", "Expecting"),
     ('{"time_s": 1, "mood": 2}', "no mood"), ('{"time_s": 1, "holds": 2}', "holds is a list")],
)  # fmt: skip
def test_no_snapshot(line: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        recording.load(line)
    file = tmp_path / "day.jsonl"
    file.write_text(f"# a day\n\n{line}\n")
    with pytest.raises(ValueError, match=f"line 3: .*{why}"):
        list(recording.read(file))


def test_time_does_not_go_back(tmp_path: Path) -> None:
    file = tmp_path / "day.jsonl"
    file.write_text('{"time_s": 2}\n{"time_s": 1}\n')
    with pytest.raises(ValueError, match="line 2: time goes back"):
        list(recording.read(file))
