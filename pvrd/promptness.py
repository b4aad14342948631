# SPDX-License-Identifier: Apache-2.0
"""How soon the control process runs once it has something to do.

It computes little and all answers wait for that little: under load what it takes is the time until
the kernel lets it run. From Linux 6.12 on a thread may ask for shorter slices than others
(sched_setattr, sched_runtime): the same share of the processor in smaller pieces, and so sooner.
That needs no right. Older kernels ignore it. Where it has the right to, it also takes the nice
value that its unit has, for itself and, if it leads one, for its session: the kernel shares time
between sessions first (autogroup, sched(7)).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from pathlib import Path

SLICE_NS = 100_000  # the least that the kernel takes
NICE = -5  # as in systemd/pvrd.service
AUTOGROUP = Path("/proc/self/autogroup")
_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
_RESET_ON_FORK = 1  # workers, and other children, are as everybody


def stand_in_front() -> bool:
    """Asks for it, for the calling thread; False where that is refused, or where the process was
    given another class of scheduling than the usual one.
    """
    number = _SETATTR.get(platform.machine())
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice:  # somebody gave it that
        return _ask(number, nice)
    # With the flag in one call: where that is refused no child inherits a value alone.
    if not _ask(number, NICE):
        return _ask(number, 0)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            AUTOGROUP.write_text(str(NICE), "ascii")
    return True


def _ask(number: int, nice: int) -> bool:
    """For short slices, and this nice value; False where that is refused."""
    # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
    values = 48, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, SLICE_NS, 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(number, 0, struct.pack("=IIQiIQQQ", *values), 0) == 0)
