# SPDX-License-Identifier: Apache-2.0
"""Which seats of a video session are open, and which levels barred, by what governor and workers
say.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pvrd.errors import BadModel, DeviceLost, OutOfMemory
from pvrd.governor import Decision
from pvrd.video_layout import Format, lay_out
from pvrd.video_placement import Placement
from pvrd.video_seat import Seat

KINDS = ("gpu", "cpu")
FORM = Format(64, 32, "i420")


class Session:
    """As VideoSession, without a bus; seats that are opened wait for ever."""

    def __init__(self, choice: str = "auto", adapt: bool = True) -> None:
        self.id, self.choice, self.adapt, self.asleep = "s1", choice, adapt, False
        self.models = [SimpleNamespace(name="large", key="large")]
        self.model = self.models[0]
        self.layout = lay_out(FORM, FORM.sized(128, 64), 2)
        self.changed: list[str] = []
        self.uses: list[str] = []
        gpu, cpu = (SimpleNamespace(kind=k, state="ready", reason="", use=None) for k in KINDS)
        self.supervisor = SimpleNamespace(
            gpu=gpu, cpu=cpu, decision=Decision(),
            use=lambda model: self.uses.append(model.key),
            release=lambda model: self.uses.remove(model.key),
        )  # fmt: skip
        tree = SimpleNamespace(changed=lambda _, *names: self.changed.extend(names))
        self.core = SimpleNamespace(supervisor=self.supervisor, tree=tree, task=self.task)

    def task(self, work: Any) -> Any:
        work.close()
        return SimpleNamespace(cancel=lambda: None)


def placed(session: Session, leaves: bool = False) -> Placement:
    smaller = [[SimpleNamespace(name=name, key=name)] for name in ("middle", "small")]
    return Placement(cast("Any", session), cast("Any", smaller if session.adapt else ()), leaves)


def is_open(placement: Placement) -> list[str]:
    return [seat.id for seat in placement.seats if seat.wanted]


@pytest.fixture(autouse=True)
def no_current_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pvrd.video_seat.asyncio.current_task", lambda: None)


@pytest.mark.parametrize(
    ("choice", "adapt", "names"),
    [
        ("auto", True, ["gpu large", "gpu middle", "gpu small", "cpu large", "cpu middle",
                        "cpu small", "plain"]),
        ("gpu", True, ["gpu large", "gpu middle", "gpu small", "plain"]),
        ("cpu", True, ["cpu large", "cpu middle", "cpu small", "plain"]),
        ("auto", False, ["gpu large", "cpu large"]),
        ("gpu", False, ["gpu large"]),
    ],
)  # fmt: skip
def test_levels_stand_the_best_first(choice: str, adapt: bool, names: list[str]) -> None:
    session = Session(choice, adapt)
    placement = placed(session)
    assert placement.names() == names
    assert (placement.ladder.levels[-1].takes is not None) == adapt
    placement.use()
    assert set(session.uses) == {name.split()[-1] for name in names} - {"large", "plain"}
    placement.release()
    assert session.uses == []


def test_seats_open_where_the_governor_wants_them() -> None:
    session = Session()
    placement, supervisor = placed(session), session.supervisor
    placement.steer(False)
    assert is_open(placement) == ["s1", "s1.less"]
    placement.steer(True)
    assert is_open(placement) == ["s1", "s1.less", "s1.floor"]
    supervisor.decision = Decision(device="cpu")  # a GPU that is only busy is kept at hand
    placement.steer(True)
    assert is_open(placement) == ["s1", "s1.less", "s1.home", "s1.floor"]
    placement.gpu.held[7] = 0
    supervisor.decision = Decision(device="cpu", release=True)
    placement.steer(True)
    assert is_open(placement) == ["s1", "s1.home", "s1.floor"]  # until it said its word
    placement.gpu.held.clear()
    placement.steer(True)
    assert is_open(placement) == ["s1.home", "s1.floor"]
    supervisor.decision = Decision()
    placement.gpu.ready = placement.home.ready = True
    placement.ladder.at = 3  # the CPU still makes frames
    placement.steer(True)
    assert is_open(placement) == ["s1", "s1.less", "s1.home", "s1.floor"]
    placement.ladder.at = 0
    placement.steer(True)
    assert is_open(placement) == ["s1", "s1.less", "s1.floor"]
    session.asleep = True
    placement.steer(True)
    assert is_open(placement) == []


def test_the_first_seat_waits_for_smaller_networks() -> None:
    placement = placed(Session())
    placement.steer(False)
    assert placement.first() is None
    assert not placement.ready()
    placement.gpu.ready = True
    assert placement.first() is None
    assert placement.ready()
    assert placement.barred(True, ())[0] == "the gpu opens smaller networks"
    assert 0 not in placement.barred(False, ())
    placement.less.ready = True
    assert placement.first() is placement.gpu


def test_a_session_stays_where_the_gpu_cannot_hold_it() -> None:
    session = Session()
    placement = placed(session)
    placement.steer(False)
    assert not placement.failed(placement.gpu, OutOfMemory("too large"))
    assert placement.names()[0] == "gpu large (left out: OutOfMemory: too large)"
    assert session.changed == ["Levels"]
    placement.steer(False)
    assert is_open(placement) == ["s1.home"]


@pytest.mark.parametrize(
    ("choice", "name", "state", "error", "ends"),
    [
        ("auto", "gpu", "ready", DeviceLost("x"), False),
        ("auto", "gpu", "ready", BadModel("x"), True),
        ("auto", "home", "ready", OutOfMemory("x"), True),
        ("auto", "less", "ready", BadModel("x"), False),
        ("auto", "gpu", "absent", DeviceLost("x"), False),
        ("gpu", "gpu", "ready", OutOfMemory("x"), True),
        ("gpu", "less", "disabled", BadModel("x"), False),
    ],
)
def test_which_failure_ends_a_session(
    choice: str, name: str, state: str, error: Any, ends: bool
) -> None:
    placement = placed(Session(choice))
    seat: Seat = getattr(placement, name)
    seat.worker.state = state
    assert placement.failed(seat, error) == ends
    # A worker that is gone may come again: the seat is not left out for it.
    assert bool(seat.failed) == (not ends and state == "ready")


def test_levels_that_cannot_be_used_say_why() -> None:
    session = Session()
    placement, supervisor = placed(session), session.supervisor
    for seat in placement.seats:
        seat.ready = True
    assert placement.barred(True, ()) == {}
    assert placement.barred(False, ()) == {6: "it is for frames with deadlines"}
    assert placement.barred(True, {"gpu"}) == dict.fromkeys(range(3), "the gpu does not answer")
    supervisor.decision = Decision(device="cpu", reason="a game runs")
    assert placement.barred(True, ()) == dict.fromkeys(range(3), "a game runs")
    supervisor.decision = Decision(precision="low", reason="the battery is low")
    assert placement.barred(True, ()) == dict.fromkeys((0, 3), "the battery is low")
    supervisor.decision = Decision()
    supervisor.gpu.state, supervisor.gpu.reason = "restarting", "it hung"
    placement.gpu.ready = placement.less.ready = placement.floor.ready = False
    found = placement.barred(True, ())
    assert [found.get(at) for at in range(4)] == [*["it hung"] * 3, None]
    assert found[6] == "the cpu has not opened it yet"
    assert 6 not in placed(session, leaves=True).barred(True, ())  # the client does it


def test_a_seat_tells_what_its_levels_take() -> None:
    placement = placed(Session())
    placement.know(placement.less, [0.02, None, 0.5])  # plain interpolation there has no level
    assert [level.takes for level in placement.ladder.levels[:4]] == [None, 0.02, None, None]
