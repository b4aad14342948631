# SPDX-License-Identifier: Apache-2.0
"""upscale --realtime: the pace, deadlines, and frames that are dropped or late."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pvrd.client_video import Done
from pvrd.ctl.realtime import Pace, rate, words
from pvrd.y4m import Header
from tests.ctl.test_ctl_upscale import clip, doubled


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def done(seq: int, dropped: bool = False, level: int = 0) -> Done:
    return Done(seq, 0, seq, dropped, False, 4, 0, 1.0, "cpu", level)


@pytest.mark.parametrize(
    ("text", "fps"), [("25", 25.0), ("29.97", 29.97), ("30000:1001", 30000 / 1001), ("50:1", 50.0)]
)
def test_rates(text: str, fps: float) -> None:
    assert rate(text) == fps


@pytest.mark.parametrize(
    "text", ["", "0", "0:0", "25:0", "-5", "x", "1:x", "2000", "nan", "1e-320", "1:999999999999"]
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError):
        rate(text)


def test_frames_go_by_the_clock() -> None:
    clock = Clock()
    pace = Pace(10.0, clock)
    assert pace.left() == 0.0
    assert pace.goes(1) == pytest.approx(100.3e9)
    assert pace.left() == pytest.approx(0.1)
    clock.now += 0.1
    assert pace.left() == pytest.approx(0.0)
    assert pace.goes(2) == pytest.approx(100.4e9)


def test_a_frame_that_came_a_little_late_keeps_its_moment_and_one_much_later_moves_all() -> None:
    clock = Clock()
    pace = Pace(10.0, clock)
    pace.goes(1)
    clock.now = 100.18
    assert pace.goes(2) == pytest.approx(100.4e9)
    clock.now = 105.0
    assert pace.goes(3) == pytest.approx(105.2e9)
    assert pace.left() == 0.0


def test_what_is_counted() -> None:
    clock = Clock()
    pace = Pace(10.0, clock)
    for seq in range(1, 5):
        pace.goes(seq)
    pace.came(done(1))
    pace.came(done(2, level=2))
    clock.now += 10.0
    pace.came(done(3, level=1))
    pace.came(done(4, dropped=True))
    assert pace.record() == {"realtime": 10.0, "late": 1, "dropped": 1, "lower": 2}
    said = words(pace.record())
    assert said == (
        ", 2 by less than the model's own network, 1 late, 1 left out (the one before stands in)"
    )
    assert words({"frames": 5}) == words(Pace(10.0).record()) == ""


HEADER = Header(16, 12, "50:1", "1:1", "p", "420jpeg")


@pytest.mark.bus
def test_each_frame_has_its_moment_and_its_deadline(fake, tmp_path: Path) -> None:
    source, target = tmp_path / "in.y4m", tmp_path / "out.y4m"
    header = replace(HEADER, rate="5:1")  # slow: a busy machine takes a part of what is left
    source.write_bytes(clip(header, 6))
    done = fake.run("--json", "upscale", "--realtime", str(source), str(target))
    assert (done.code, done.err) == (0, "")
    assert fake.expect("options")["adapt"] is True
    told = [fake.expect("deadline", seq=seq) for seq in range(1, 7)]
    assert all(0 < one["left_ms"] <= 600.0 for one in told)
    # A file could be read at once; the frames came as the clip's pace has them.
    assert told[-1]["at_s"] - told[0]["at_s"] >= 4 * 0.2
    assert done.json["realtime"] == 5.0
    assert (done.json["frames"], done.json["dropped"]) == (6, 0)
    assert target.read_bytes() == doubled(source.read_bytes(), header, 6)


@pytest.mark.bus
def test_the_frame_before_stands_in_for_one_that_is_dropped(fake) -> None:
    data = clip(HEADER, 6)
    done = fake.run("upscale", "--realtime", "--model", "drops", "-", "-", stdin=data)
    assert (done.code, done.err) == (0, "")
    whole = doubled(data, HEADER, 6)
    head = len(HEADER.sized(32, 24).line())
    size = (len(whole) - head) // 6
    frames = [whole[head + i * size : head + (i + 1) * size] for i in range(6)]
    shown = [frames[i] for i in (0, 1, 1, 3, 4, 4)]  # numbers 3 and 6 are dropped
    assert done.out == whole[:head] + b"".join(shown)
    assert all(a != b for a, b in itertools.pairwise(frames))


@pytest.mark.bus
def test_the_first_frame_that_is_made_stands_in_for_those_dropped_before_it(fake) -> None:
    data = clip(HEADER, 4)
    done = fake.run("--json", "upscale", "--realtime", "--model", "slow", "-", "-", stdin=data)
    whole = doubled(data, HEADER, 4)
    head = len(HEADER.sized(32, 24).line())
    size = (len(whole) - head) // 4
    frames = [whole[head + i * size : head + (i + 1) * size] for i in range(4)]
    assert done.out == whole[:head] + 3 * frames[2] + frames[3]
    assert json.loads(done.err)["frames"] == 4


@pytest.mark.bus
def test_a_clip_of_which_nothing_is_made_in_time_fails(fake) -> None:
    done = fake.run(
        "upscale", "--realtime", "--model", "slow", "-", "-", stdin=clip(HEADER, 2)
    )  # fmt: skip
    assert (done.code, done.out) == (1, b"")
    assert "in time" in done.err


@pytest.mark.bus
def test_raw_video_needs_to_be_told_its_rate(fake) -> None:
    data = bytes(16 * 12 * 3 // 2)
    refused = fake.run("upscale", "--realtime", "--raw", "16x12", "-", "-", stdin=data)
    assert refused.code == 2
    assert "say --fps" in refused.err
    given = ("--realtime", "--fps", "100", "--raw", "16x12")
    assert fake.run("upscale", *given, "-", "-", stdin=data).code == 0


@pytest.mark.bus
@pytest.mark.parametrize(
    ("options", "data", "word"),
    [
        (["--fps", "25"], clip(HEADER, 1), "--realtime"),
        (["--realtime"], b"\x89PNG\r\n\x1a\n", "pictures"),
        (["--realtime", "--fps", "0"], clip(HEADER, 1), "frames a second"),
    ],
)
def test_wrong_calls(fake, options: list[str], data: bytes, word: str) -> None:
    done = fake.run("upscale", *options, "-", "-", stdin=data)
    assert done.code == 2
    assert word in done.err
