# SPDX-License-Identifier: Apache-2.0
"""What memory there is, so that a request that cannot fit is refused with figures before it takes
any.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import OutOfMemory

# Left to everything else on the machine.
RESERVE = 64 << 20


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
