# SPDX-License-Identifier: Apache-2.0
"""Each thread of a team has about as much to do of a network as a stream of rows (strip.h)."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent.parent / "kernels"


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """strips.c, for the plainest instruction set."""
    made = tmp_path_factory.mktemp("strips") / "strips.so"
    cc = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    flags = [*shlex.split(os.environ.get("CFLAGS", "")), f"-I{KERNELS / 'include'}"]
    subprocess.run(
        [cc, "-O1", "-fPIC", "-shared", "-std=gnu11", *flags, "-o", made, HERE / "strips.c"],
        check=True,
    )
    loaded = ctypes.CDLL(str(made))
    loaded.divided.restype = ctypes.c_size_t
    return loaded


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("size", [(640, 360), (320, 180), (480, 270), (856, 240), (960, 270)])
def test_no_thread_has_much_more_to_do(
    lib: ctypes.CDLL, size: tuple[int, int], threads: int
) -> None:
    tw, th = size
    layers = 6
    units = (ctypes.c_size_t * threads)()
    assert lib.divided(tw, th, layers, threads, units) == tw * th
    assert max(units) <= 1.25 * sum(units) / threads
    assert sum(units) <= 1.5 * tw * th  # the rest is done by more than one


@pytest.mark.parametrize("size", [(8, 2), (8, 4000), (1024, 2), (132, 6)])
def test_odd_tiles_are_done_whole(lib: ctypes.CDLL, size: tuple[int, int]) -> None:
    for threads in (1, 2, 5, 64):
        units = (ctypes.c_size_t * threads)()
        assert lib.divided(*size, 6, threads, units) == size[0] * size[1]
