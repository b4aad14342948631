# SPDX-License-Identifier: Apache-2.0
"""The scheduler in simulated time: for any mix of jobs each share is met within 5 %, a deadline
that can be met is met, nothing starves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pvrd.scheduler import AGE_S, AGED, OTHERS, Ready, Scheduler, level, weight

# A failing mix is told as it was drawn: to simplify it takes minutes.
mixes = settings(
    max_examples=12, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate]
)


@dataclass(eq=False)
class Job:
    """Always busy, or with a frame each `period_s` that takes `frame_s` and has until the next."""

    name: str
    slice_s: float
    priority: int = 5
    share: float = 0.0
    period_s: float = 0.0
    frame_s: float = 0.0
    rescue_s: float = 0.0
    begins_s: float = 0.0
    ends_s: float = 1e9
    # what came of it
    had_s: float = 0.0
    wait_s: float = 0.0
    since_s: float | None = None
    met: int = 0
    late: int = 0
    waiting: list[tuple[float, float]] = field(default_factory=list)  # (deadline, work left)
    frames: int = 0

    def arrive(self, now: float) -> None:
        while self.period_s and now >= self.begins_s + self.frames * self.period_s:
            self.frames += 1
            self.waiting.append((self.begins_s + self.frames * self.period_s, self.frame_s))
        while self.waiting and self.waiting[0][0] < now and self.waiting[0][1] == self.frame_s:
            self.waiting.pop(0)  # as pvrd drops a frame that is late before it is begun
            self.late += 1

    def ready(self, now: float) -> Ready | None:
        if not self.begins_s <= now < self.ends_s:
            return None
        if not self.period_s:
            return Ready(self.name)
        self.arrive(now)
        if not self.waiting:
            return None
        return Ready(self.name, self.waiting[0][0], self.rescue_s)

    def run(self, now: float) -> float:
        if not self.period_s:
            return self.slice_s
        deadline, left = self.waiting[0]
        took = min(self.slice_s, left)
        if self.rescue_s and deadline - now < self.slice_s + self.rescue_s:
            took = left = self.rescue_s
        left -= took
        self.waiting[0] = deadline, left
        if left <= 1e-12:
            self.waiting.pop(0)
            self.met += now + took <= deadline + 1e-9
            self.late += now + took > deadline + 1e-9
        return took


def simulate(jobs: Sequence[Job], seconds: float, from_s: float = 0.0) -> float:
    """Runs them; the seconds in which the device worked. Counts begin at `from_s`."""
    scheduler, now, worked = Scheduler(), 0.0, 0.0
    for job in jobs:
        scheduler.add(job.name, job.priority, job.share)
    by_name = {job.name: job for job in jobs}
    while now < seconds:
        ready = {job.name: r for job in jobs if (r := job.ready(now)) is not None}
        for job in jobs:
            if job.name not in ready:
                job.since_s = None
            elif job.since_s is None:
                job.since_s = now
        chosen = scheduler.pick(ready.values(), now)
        if chosen is None:
            coming = [j.begins_s + (j.frames * j.period_s) for j in jobs if j.period_s]
            coming += [j.begins_s for j in jobs]
            later = [t for t in coming if t > now]
            if not later:
                break
            now = min(later)
            continue
        job = by_name[str(chosen)]
        assert job.since_s is not None
        job.wait_s = max(job.wait_s, now - job.since_s)
        took = job.run(now)
        now += took
        job.since_s = now
        if now >= from_s:
            worked += took
            job.had_s += took
        scheduler.charge([chosen], took, now)
    return worked


slices = st.floats(0.0005, 0.02)
priorities = st.integers(0, 15)


@st.composite
def busy_mixes(draw: st.DrawFn) -> list[Job]:
    """Jobs that always have work, some with shares that sum up to 100 % at most."""
    jobs, left = [], 1.0
    for i in range(draw(st.integers(2, 10))):
        share = round(draw(st.floats(0, left)), 2) if draw(st.booleans()) else 0.0
        left = max(0.0, left - share)
        jobs.append(Job(f"j{i}", draw(slices), draw(priorities), share))
    return jobs


@mixes
@given(busy_mixes())
def test_each_share_is_met_within_5_percent(jobs: list[Job]) -> None:
    longest = max(job.slice_s for job in jobs)
    # Long enough that a slice is little beside the smallest share.
    least = min((job.share for job in jobs if job.share), default=1.0)
    seconds = min(max(4.0, 60 * longest / least), 40.0)
    worked = simulate(jobs, seconds)
    for job in jobs:
        if job.share * seconds >= 60 * longest:
            assert job.had_s >= 0.95 * job.share * worked, (job.name, job.had_s / worked)


@mixes
@given(busy_mixes())
def test_nothing_starves(jobs: list[Job]) -> None:
    seconds = 12.0
    simulate(jobs, seconds)
    # A round of those that wait, at the part of the time that is theirs.
    bound = AGE_S + 2 * sum(job.slice_s for job in jobs) / AGED
    for job in jobs:
        assert job.wait_s <= bound, (job.name, job.wait_s, bound)
        if bound < seconds:
            assert job.had_s > 0


@st.composite
def streams(draw: st.DrawFn) -> list[Job]:
    """Streams whose frames can all be met, beside anything else."""
    jobs: list[Job] = []
    promised = draw(st.floats(0, 0.4))
    # What is left when shares, those that wait long and those without a deadline have theirs.
    left = (1 - promised) * (1 - OTHERS) - AGED - 0.1
    for i in range(draw(st.integers(1, 4))):
        period = draw(st.floats(0.04, 0.2))
        part = draw(st.floats(0.02, max(0.03, left / 2)))
        if part > left:
            break
        left -= part
        jobs.append(
            Job(f"v{i}", period / 40, draw(priorities), 0.0, period, part * period,
                begins_s=draw(st.floats(0, 0.3)))
        )  # fmt: skip
    if promised > 0.02:
        jobs.append(Job("promised", 0.001, draw(priorities), promised))
    jobs += [Job(f"t{i}", 0.001, draw(priorities)) for i in range(draw(st.integers(0, 3)))]
    return jobs


@mixes
@given(streams())
def test_a_deadline_that_can_be_met_is_met(jobs: list[Job]) -> None:
    simulate(jobs, 6.0)
    for job in jobs:
        if job.period_s:
            assert job.met > 5
            assert job.late <= 1, job  # the first, when nobody knows yet what it takes


@mixes
@given(streams(), st.floats(1.05, 5.0), st.integers(1, 2), st.booleans())
def test_one_that_cannot_be_met_ruins_no_other(
    jobs: list[Job], load: float, count: int, rescue: bool
) -> None:
    # The known ones first: what is let in stays in.
    late = [
        Job(f"x{i}", 0.001, 5, 0.0, 0.1, load * 0.1, 0.002 if rescue else 0.0, 0.6)
        for i in range(count)
    ]
    simulate([*jobs, *late], 6.0)
    for job in jobs:
        if job.period_s:
            assert job.late <= 0.05 * (job.met + job.late) + 1, job


def test_what_takes_longer_than_was_thought_is_given_up_before_it_ruins_another() -> None:
    known = Job("v", 0.0016, 4, 0.0, 0.065, 0.0182)
    others = [Job("promised", 0.001, 9, 0.18), Job("t", 0.001, 4)]
    late = [Job(f"x{i}", 0.001, 5, 0.0, 0.1, 0.44, 0.002, 0.6) for i in range(2)]
    simulate([known, *others, *late], 6.0)
    assert known.late <= 1  # 25 of 92 where only their beginnings were looked at
    assert sum(job.met for job in late) > 40  # by their cheap ends


@mixes
@given(streams(), st.floats(0.4, 0.9))
def test_frames_that_are_too_many_leave_shares_alone(jobs: list[Job], share: float) -> None:
    jobs = [job for job in jobs if job.name != "promised"]
    jobs += [Job(f"x{i}", 0.001, 11, 0.0, 0.1, 0.09) for i in range(3)]
    jobs.append(Job("promised", 0.001, 0, share))
    worked = simulate(jobs, 6.0)
    assert jobs[-1].had_s >= 0.95 * share * worked


def test_a_frame_that_is_lost_gets_its_cheap_end_in_time() -> None:
    frames = Job("v", 0.002, 5, 0.0, 0.04, 0.1, rescue_s=0.004)
    text = Job("t", 0.002, 5)
    simulate([frames, text], 8.0)
    assert frames.late <= 2
    assert frames.met > 150
    assert text.had_s > 0.1 * 8


@mixes
@given(
    st.integers(2, 4), st.floats(1.1, 5.0), st.floats(0.002, 0.01), st.floats(0.0005, 0.004),
    st.integers(0, 2), st.floats(0.0, 0.2),
)  # fmt: skip
def test_cheap_ends_of_about_one_time_are_had_in_turn(
    count: int, load: float, rescue: float, slice_s: float, texts: int, apart: float
) -> None:
    """Frames of several streams are due at once, and none can be made in time: each of them is
    ended cheaply about as often as the others, and one at least each time."""
    frames = [
        Job(f"x{i}", slice_s, 5, 0.0, 0.1, load * 0.1, rescue, i * apart * rescue)
        for i in range(count)
    ]
    simulate([*frames, *(Job(f"t{i}", slice_s, 5) for i in range(texts))], 9.0)
    met = [job.met for job in frames]
    assert sum(met) >= 80, met  # of 90
    assert min(met) >= 0.5 * sum(met) / count, met


def test_one_that_comes_later_has_its_turns_and_no_more() -> None:
    """What it did not ask for before is not owed to it."""
    old = Job("old", 0.001, 5, 0.0, 0.1, 0.3, 0.002)
    new = Job("new", 0.001, 5, 0.0, 0.1, 0.3, 0.002, begins_s=6.0)
    simulate([old, new], 12.0)
    assert 20 < new.met < 40
    assert old.met > 60 + 20


@mixes
@given(st.lists(st.tuples(priorities, slices), min_size=2, max_size=8))
def test_a_level_is_shared_by_weight(given: list[tuple[int, float]]) -> None:
    jobs = [Job(f"j{i}", cost, priority) for i, (priority, cost) in enumerate(given)]
    top = max(level(job.priority) for job in jobs)
    inside = [job for job in jobs if level(job.priority) == top]
    worked = simulate(jobs, 20.0)
    total = sum(weight(job.priority) for job in inside)
    assert sum(job.had_s for job in inside) >= (1 - AGED - 0.01) * worked
    for job in inside:
        part = job.had_s / sum(j.had_s for j in inside)
        assert abs(part - weight(job.priority) / total) <= 0.05


@mixes
@given(st.lists(slices, min_size=1, max_size=6), st.integers(0, 11))
def test_a_higher_level_that_comes_waits_one_slice(costs: list[float], other: int) -> None:
    jobs = [Job(f"j{i}", cost, other) for i, cost in enumerate(costs)]
    urgent = Job("urgent", 0.001, 15, begins_s=1.0001, ends_s=1.2)
    simulate([*jobs, urgent], 2.0)
    assert urgent.wait_s <= max(costs) + 1e-9
    assert urgent.had_s > 0.15


@mixes
@given(busy_mixes(), st.data())
def test_what_was_away_saves_up_nothing(jobs: list[Job], data: st.DataObject) -> None:
    """One that comes back after seconds takes no more than its part from the others."""
    for job in jobs:
        job.priority, job.share = 5, 0.0
    late = data.draw(st.sampled_from(jobs))
    late.begins_s = 3.0
    before = defaultdict(float)
    simulate(jobs, 6.0, from_s=3.0)
    for job in jobs:
        before[job.name] = job.had_s
    part = 1 / len(jobs)
    longest = max(job.slice_s for job in jobs)
    assert late.had_s <= 3.0 * part + 2 * longest + 0.1


def test_tasks_of_one_account_have_its_share_together() -> None:
    scheduler = Scheduler()
    for key in ("a", "b"):
        scheduler.add(key, 0, 0.4, account="session")
    scheduler.add("c", 8)
    had: dict[str, float] = defaultdict(float)
    now = 0.0
    for _ in range(4000):
        picked = scheduler.pick([Ready("a"), Ready("b"), Ready("c")], now)
        now += 0.001
        had[str(picked)] += 0.001
        scheduler.charge([picked], 0.001, now)
    assert had["a"] + had["b"] >= 0.95 * 0.4 * now
    assert had["a"] + had["b"] <= 0.5 * now
    assert abs(had["a"] - had["b"]) <= 0.1 * now


def test_a_slice_for_several_is_charged_to_each_of_them() -> None:
    scheduler = Scheduler()
    for key in "abc":
        scheduler.add(key, 5)
    had: dict[str, float] = defaultdict(float)
    now = 0.0
    for _ in range(1200):
        key = str(scheduler.pick([Ready(k) for k in "abc"], now))
        served = ["a", "b"] if key in "ab" else ["c"]
        now += 0.001
        for one in served:
            had[one] += 0.001 / len(served)
        scheduler.charge([key, *(k for k in served if k != key)], 0.001, now)
    assert max(had.values()) - min(had.values()) <= 0.05 * now


def test_removed_and_unknown_keys() -> None:
    scheduler = Scheduler()
    assert scheduler.pick([], 0.0) is None
    scheduler.add("a", 5, 0.5)
    scheduler.remove("a")
    scheduler.remove("a")
    assert len(scheduler) == 0
    assert "a" not in scheduler
    assert scheduler.pick([Ready("a")], 0.0) is None
    scheduler.charge(["a"], 1.0, 1.0)


def test_a_cheap_end_that_is_due_goes_first_among_long_slices() -> None:
    scheduler, now = Scheduler(), 0.0
    scheduler.add("long", 11)
    scheduler.add("frame", 0)
    for _ in range(50):
        scheduler.pick([Ready("long")], now)
        now += 0.02
        scheduler.charge(["long"], 0.02, now)
    due = Ready("frame", now + 0.008, 0.002)
    assert scheduler.pick([Ready("long"), due], now) == "frame"


def test_a_slice_that_could_have_been_ended_is_no_obstacle_to_a_deadline() -> None:
    """Ten tokens of 2 ms in a slice: a frame of 3 ms that is due in 12 ms waits for one of them."""
    picked = []
    for pieces in (1, 10):
        scheduler, now = Scheduler(), 0.0
        scheduler.add("text", 11)
        scheduler.add("frame", 5)
        for _ in range(20):
            now += 0.001
            due = Ready("frame", now + 0.04)
            scheduler.pick([due], now)
            scheduler.charge(["frame"], 0.003, now)
            scheduler.pick([Ready("text")], now)
            now += 0.02
            scheduler.charge(["text"], 0.02, now, pieces)
        picked.append(scheduler.pick([Ready("text"), Ready("frame", now + 0.012)], now))
    assert picked == ["text", "frame"]
