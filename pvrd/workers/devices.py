# SPDX-License-Identifier: Apache-2.0
"""Which device this worker owns, or why it has none. Imports no library before it has to (see __main__)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from engine.backends.base import Backend, DeviceInfo


def thread_count(config: Mapping[str, Any]) -> int:
    """Threads of the CPU backend: `threads` of the configuration, else one for each physical core.

    With four cores and more one is left to the rest of the system. Never more than this process may run on.
    """
    allowed = len(os.sched_getaffinity(0))
    wanted = int(config.get("threads") or 0)
    if wanted > 0:
        return min(wanted, allowed)
    cores = min(psutil.cpu_count(logical=False) or allowed, allowed)
    return max(1, cores - 1 if cores >= 4 else cores)
