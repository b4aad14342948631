# SPDX-License-Identifier: Apache-2.0
"""The runtime's team of threads, with operations made for trying it: see team_ops.c."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.backends.cpu import _CALL as CALL
from kernels.discover import dispatch

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent.parent / "kernels"
OPS = ["rounds", "scratch", "greedy", "count"]


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The runtime with the operations of team_ops.c, for the plainest instruction set."""
    folder = tmp_path_factory.mktemp("team")
    (folder / "dispatch.c").write_text(dispatch(["base"], OPS))
    cc = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    sources = [folder / "dispatch.c", HERE / "team_ops.c"]
    sources += [KERNELS / "runtime" / "team.c", KERNELS / "runtime" / "isa.c"]
    subprocess.run(
        [cc, "-O2", "-fopenmp", "-fPIC", "-shared", "-std=gnu11", "-Wall", "-Wextra", "-Werror"]
        + shlex.split(os.environ.get("CFLAGS", ""))
        + [f"-I{KERNELS / 'include'}", f"-I{KERNELS / 'runtime'}", "-o", str(folder / "team.so")]
        + [str(s) for s in sources],
        check=True,
    )
    loaded = ctypes.CDLL(str(folder / "team.so"))
    loaded.pvr_run.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int]
    return loaded


class Slice:
    """Calls with one buffer of counts and one of errors."""

    def __init__(self, lib: ctypes.CDLL, calls: Sequence[tuple[str, int]]) -> None:
        self.lib = lib
        self.counts = np.zeros(256, np.uint32)
        self.errors = np.zeros(1, np.uint32)
        self.calls = np.zeros(len(calls), CALL)
        for row, (name, push) in zip(self.calls, calls, strict=True):
            row["op"] = lib.pvr_op_index(name.encode()) & 0xFFFFFFFF
            row["push"][0] = push
            row["buf"][1] = self.counts.ctypes.data
            row["buf"][2] = self.errors.ctypes.data

    def run(self, threads: int) -> int:
        status: int = self.lib.pvr_run(self.calls.ctypes.data, len(self.calls), threads)
        return status


@pytest.mark.parametrize("threads", range(1, 9))
def test_a_barrier_holds_back_everyone(lib: ctypes.CDLL, threads: int) -> None:
    """Also with far more threads than CPUs, where a barrier that only spins would take minutes."""
    trial = Slice(lib, [("rounds", 200), ("rounds", 100), ("count", 0)])
    assert trial.run(threads) == 0
    assert trial.errors[0] == 0
    assert trial.counts[1] == threads


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_scratch_is_common_and_grows(lib: ctypes.CDLL, threads: int) -> None:
    sizes = [100, 64, 5000, 1, 300000, 70]
    trial = Slice(lib, [("scratch", s) for s in sizes])
    for _ in range(3):
        assert trial.run(threads) == 0
    assert trial.errors[0] == 0


def test_scratch_that_is_not_there_ends_the_slice(lib: ctypes.CDLL) -> None:
    trial = Slice(lib, [("count", 0), ("greedy", 0), ("count", 0)])
    assert trial.run(3) == -2
    assert trial.errors[0] == 0
    assert trial.counts[0] == 1
    again = Slice(lib, [("scratch", 100), ("count", 0)])
    assert again.run(3) == 0
    assert again.counts[0] == 1


def test_an_unknown_operation_is_refused_before_anything_runs(lib: ctypes.CDLL) -> None:
    trial = Slice(lib, [("count", 0), ("no_such_op", 0)])
    assert trial.run(2) == -1
    assert trial.counts[0] == 0


def test_an_empty_slice(lib: ctypes.CDLL) -> None:
    assert Slice(lib, []).run(2) == 0


def test_slices_side_by_side(lib: ctypes.CDLL) -> None:
    """Two callers at once, each with a team and a scratch of its own."""
    trials = [Slice(lib, [("scratch", 4000), ("rounds", 20)] * 5) for _ in range(3)]
    status: list[int] = []

    def work(trial: Slice) -> None:
        status.extend(trial.run(2) for _ in range(10))

    threads = [threading.Thread(target=work, args=(t,)) for t in trials]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert status == [0] * 30
    assert all(t.errors[0] == 0 for t in trials)


def test_nobody_yields() -> None:
    """Linux 6.18 takes the rest of its slice from a thread that yields, at each barrier of a token:
    beside 30 others a team was ten times as slow, at the same CPU time.
    """
    code = (KERNELS / "runtime" / "team.c").read_text(encoding="utf-8")
    assert "sched_yield(" not in code
