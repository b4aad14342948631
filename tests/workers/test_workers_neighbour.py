# SPDX-License-Identifier: Apache-2.0
"""Workers that compute on CPUs as neighbours: cores, and how their threads stand."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pvrd.workers import neighbour
from pvrd.workers.neighbour import Neighbour, choose, group_nice, own_cgroup, reversible
from tests.workers.conftest import ROOT, Peer


def board(root: Path, capacities: list[int], siblings: dict[int, str] | None = None) -> Path:
    """A /sys/devices/system/cpu."""
    for cpu, capacity in enumerate(capacities):
        folder = root / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        if capacity:
            (folder / "cpu_capacity").write_text(f"{capacity}\n")
        text = (siblings or {}).get(cpu, str(cpu))
        (folder / "topology/thread_siblings_list").write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("capacities", "wanted", "reserve", "cpus", "threads"),
    [
        # One or two cores: all of them. Three and more: one stays free.
        ([0], 0, 1, {0}, 1),
        ([0, 0], 0, 1, {0, 1}, 2),
        ([0, 0, 0], 0, 1, {0, 1, 2}, 2),
        ([0] * 8, 0, 1, set(range(8)), 7),
        ([0] * 8, 0, 3, set(range(8)), 5),
        ([0] * 8, 0, 0, set(range(8)), 8),
        ([0] * 4, 0, 100, set(range(4)), 1),
        # big.LITTLE: the big ones; little ones are what stays free.
        ([430, 430, 430, 430, 1024, 1024], 0, 1, {4, 5}, 2),
        ([1024, 1024, 430, 430], 0, 1, {0, 1}, 2),
        ([430, 1024, 1024, 1024], 0, 2, {1, 2}, 2),
        # Three kinds: the middle ones are big enough.
        ([300, 300, 870, 870, 1024], 0, 1, {2, 3, 4}, 3),
        # So many were asked for.
        ([430, 430, 1024, 1024], 1, 1, {2, 3}, 1),
        ([430, 430, 1024, 1024], 3, 1, {0, 1, 2, 3}, 3),
        ([0] * 4, 99, 1, {0, 1, 2, 3}, 4),
    ],
)
def test_cores(
    tmp_path: Path, capacities: list[int], wanted: int, reserve: int, cpus: set[int], threads: int
) -> None:
    root = board(tmp_path, capacities)
    found = choose(frozenset(range(len(capacities))), wanted, reserve, root)
    assert (found.cpus, found.threads) == (cpus, threads)


def test_a_core_with_two_threads_is_one(tmp_path: Path) -> None:
    root = board(tmp_path, [0] * 8, {i: f"{i % 4},{i % 4 + 4}" for i in range(8)})
    assert choose(frozenset(range(8)), 0, 1, root).threads == 3
    # Of those that this process may use.
    assert choose(frozenset({0, 1, 4, 5}), 0, 1, root).threads == 2


def test_cpus_without_a_word_in_sysfs(tmp_path: Path) -> None:
    assert choose(frozenset({3, 5, 7}), 0, 1, tmp_path).threads == 2


def test_what_can_be_undone() -> None:
    assert reversible("Name:\tx\nCapEff:\t0000000000800000\n", 0, 0)
    assert not reversible("CapEff:\t0000000000000000\n", 0, 0)
    assert reversible("CapEff:\t0000000000000000\n", 20, 0)
    assert not reversible("CapEff:\t0000000000000000\n", 19, 0)
    assert reversible("CapEff:\t0000000000000000\n", 15, 5)
    assert reversible("", -1, 0)


def test_without_a_way_back_nothing_is_lowered_for_good() -> None:
    made = Neighbour()
    nice = made._nice
    made.reversible = False
    assert [made.stand(level).nice for level in range(4)] == [nice] * 4
    assert made.stand(0).policy == made.stand(1).policy == os.SCHED_BATCH
    assert made.stand(3).policy == os.SCHED_OTHER
    made.reversible = True
    assert made.stand(0).policy == os.SCHED_IDLE
    nices = [made.stand(level).nice for level in range(4)]
    assert nices == sorted(nices, reverse=True)
    assert nices[3] == nice


def test_a_cgroup_of_others_is_left_alone(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/app.slice/a.scope\n")
    folder = root / "app.slice/a.scope"
    folder.mkdir(parents=True)
    assert own_cgroup(proc, root) is None
    (folder / "cpu.weight").write_text("100")
    (folder / "cgroup.procs").write_text(f"{os.getpid()}\n1\n")
    assert own_cgroup(proc, root) is None
    (folder / "cgroup.procs").write_text(f"{os.getpid()}\n")
    assert own_cgroup(proc, root) == folder
    made = Neighbour()
    made._cgroup = folder
    for name in ("cpu.idle", "io.weight"):
        (folder / name).write_text("")
    made._weigh(neighbour.STANDS[0])
    assert [(folder / n).read_text() for n in ("cpu.idle", "cpu.weight", "io.weight")] == [
        "1", "1", "10",
    ]  # fmt: skip
    made._weigh(neighbour.STANDS[2])
    assert (folder / "cpu.weight").read_text() == "100"


def test_all_threads_stand_as_the_job_and_come_back() -> None:
    code = """
import os, threading
from pvrd.workers.neighbour import Neighbour
stop = threading.Event()
threading.Thread(target=stop.wait).start()
made = Neighbour()
seen = []
for priority in (0, 5, 9, 15, 0, 15):
    made.serve(priority)
    tids = [int(t) for t in os.listdir("/proc/self/task")]
    assert len(tids) == 2
    seen.append({(os.sched_getscheduler(t), os.getpriority(os.PRIO_PROCESS, t)) for t in tids})
    assert len(seen[-1]) == 1, seen
    assert seen[-1] == {(made.stand(priority // 4).policy, made.stand(priority // 4).nice)}, seen
assert seen[3] == seen[5] and seen[0] == seen[4] and not made.refused
stop.set()
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_its_session_stands_as_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "autogroup"
    monkeypatch.setattr(neighbour, "AUTOGROUP", file)
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpid())
    assert Neighbour()._group is None  # a kernel without groups of sessions
    file.write_text("/autogroup-7 nice 2\n")
    assert group_nice() == 2
    made = Neighbour()
    monkeypatch.setattr(made, "_apply", lambda *_: None)
    for priority, nice in ((9, None), (5, 5), (0, 12), (15, 2), (15, None)):
        file.write_text("")
        made.serve(priority)
        assert file.read_text() == ("" if nice is None else str(nice))

    def busy(*_: object) -> int:
        raise BlockingIOError

    write = os.write
    monkeypatch.setattr(os, "write", busy)
    made.serve(5)
    monkeypatch.setattr(os, "write", write)
    made.serve(5)  # said again
    assert file.read_text() == "5"
    file.unlink()
    made.serve(0)  # refused: no more is tried
    file.write_text("")
    made.serve(0)
    assert file.read_text() == ""
    monkeypatch.setattr(os, "getsid", lambda pid: 1)
    assert Neighbour()._group is None  # somebody else's session


def stands(process: subprocess.Popen[bytes]) -> set[tuple[int, int]]:
    """Classes and nice values of all threads."""
    found = set()
    for tid in map(int, os.listdir(f"/proc/{process.pid}/task")):
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            found.add((os.sched_getscheduler(tid), os.getpriority(os.PRIO_PROCESS, tid)))
    return found


@pytest.mark.gpu
def test_a_gpu_in_software_stands_as_the_cpu_does(peer: Callable[..., Peer], tiny: Path) -> None:
    """Its driver's threads, too, as many as work on the CPU would have."""
    worker = peer("gpu", allow_software=True, threads=1)
    assert worker.hello["device"]["software"]
    names = []
    for folder in Path(f"/proc/{worker.process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append((folder / "comm").read_text())
    assert len([name for name in names if name.startswith("llvmpipe")]) == 1
    cpu = peer(threads=1)
    for one in (worker, cpu):
        one.load(tiny)
    for priority in (0, 6, 13):
        for one in (worker, cpu):
            one.text(str(priority), "Once", max_tokens=2, priority=priority)
            one.answer(str(priority))
        assert len(stands(cpu.process)) == 1
        assert stands(worker.process) == stands(cpu.process)


def test_the_worker_stands_as_its_job(peer: Callable[..., Peer], tiny: Path) -> None:
    worker = peer(threads=1)
    worker.load(tiny)
    worker.text("1", "Once", max_tokens=2, priority=6)
    worker.answer("1")
    assert os.sched_getscheduler(worker.process.pid) == os.SCHED_BATCH
    worker.text("2", "Once", session="t", max_tokens=2, priority=13)
    worker.answer("2")
    assert os.sched_getscheduler(worker.process.pid) == os.SCHED_OTHER
