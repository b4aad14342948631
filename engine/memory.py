# SPDX-License-Identifier: Apache-2.0
"""What memory there is, so that a request that cannot fit is refused with figures before it takes
any; and large copies of it.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy.typing as npt

from engine.errors import OutOfMemory

# Left to everything else on the machine.
RESERVE = 64 << 20
# A core copies some GB/s, memory bears several cores: parts of a copy, and the least bytes of one.
COPIERS, COPY_BYTES = 4, 1 << 20


def available(root: Path = Path("/")) -> int:
    """Bytes that can be had without swapping: MemAvailable, or what the control group still allows.

    A file that is not there (another kernel) does not limit. `root` is for tests.
    """
    limits = [1 << 62]
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) << 10)
        own = (root / "proc/self/cgroup").read_text(encoding="utf-8").strip()
        group = own.rpartition("::")[2].lstrip("/")
        folder = root / "sys/fs/cgroup" / group
        most = (folder / "memory.max").read_text(encoding="ascii").strip()
        if most != "max":
            used = int((folder / "memory.current").read_text(encoding="ascii"))
            # Page cache counts as used, but is given up on demand.
            for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
                if line.startswith(("inactive_file ", "active_file ")):
                    used -= int(line.split()[1])
            limits.append(int(most) - max(0, used))
    except (OSError, ValueError, IndexError):
        pass
    return max(0, min(limits))


def admit(parts: dict[str, int], have: int | None = None) -> None:
    """Lets a request in when its parts (name -> bytes) fit in `have` bytes (None: what is
    available).

    Raises:
        OutOfMemory: with the figures.
    """
    have = available() if have is None else have
    need = sum(parts.values())
    if need > max(0, have - RESERVE):
        listed = ", ".join(f"{name} {nbytes >> 20} MiB" for name, nbytes in parts.items())
        raise OutOfMemory(
            f"The request needs {need >> 20} MiB ({listed}); {have >> 20} MiB are available,"
            f" of which {RESERVE >> 20} MiB stay free."
        )


@functools.cache
def _copiers() -> tuple[ThreadPoolExecutor | None, int]:
    """Threads for the parts of a copy but the first, and how many parts there may be."""
    count = min(COPIERS, len(os.sched_getaffinity(0)) // 2)
    if count < 2:
        return None, 1
    return ThreadPoolExecutor(count - 1, thread_name_prefix="copy"), count


def copy(target: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """target[:] = source, by several cores where it is large and there are cores to spare."""
    pool, most = _copiers()
    parts = min(most, target.nbytes // COPY_BYTES, len(target))
    if pool is None or parts < 2:
        target[:] = source
        return
    first, *rest = pairwise(len(target) * i // parts for i in range(parts + 1))
    others = [pool.submit(target.__setitem__, slice(*part), source[slice(*part)]) for part in rest]
    target[slice(*first)] = source[slice(*first)]
    for other in others:
        other.result()
