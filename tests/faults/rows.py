# SPDX-License-Identifier: Apache-2.0
"""The rows of the fault matrix: each fault, how it strikes, and where its reason is told."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

SLICE_S, PIPELINE_S, PING_S = 3.0, 5.0, 0.2
SLOW_MS = 30
CONFIG: dict[str, Any] = {
    "gpu.allow_software": True,
    "governor.enabled": False,
    "text.chunk": 16,
    "deadlines.slice_s": SLICE_S,
    "deadlines.pipeline_s": PIPELINE_S,
    "deadlines.ping_s": PING_S,
    "workers.backoff_s": 0.05,
    "workers.backoff_max_s": 0.2,
    "limits.slow_reader_s": 1.0,
    "limits.sessions": 64,
    "limits.queue": 64,
}


@dataclass(frozen=True)
class Fault:
    """A row. `words`: of debug.faults for the GPU worker. `journal`, `status`: patterns of the
    reason, "" where nobody is to notice anything; `quiet`: states in which the fault meets nothing.
    """

    name: str
    strike: str
    words: tuple[str, ...] = ()
    journal: str = ""
    status: str = ""
    deadline: float = 0.0  # seconds until it is found
    loses_gpu: bool = False  # the GPU's worker ends and comes back
    fresh: bool = False  # a daemon for each cell
    quiet: tuple[str, ...] = ()

    @property
    def rude(self) -> str:
        """How the ill-behaved client behaves; "" without one."""
        return self.strike.partition(":")[2] if self.strike.startswith("rude") else ""

    @property
    def ends(self) -> bool:
        """Is it the end of all sessions?"""
        return self.strike in ("bus", "pvrd")


GONE = r"the gpu worker is gone: "
SILENT = r"it did not answer for"
COMPILER = "skip_add.base"  # what the quality network needs, and nothing else here
LOST = "it lost its device"
HUNG = "the kernel says that the GPU hung"
FAULTS = (
    Fault("SIGKILL", f"signal:{int(signal.SIGKILL)}", journal=GONE + "it was killed by signal 9",
          status="killed by signal 9", loses_gpu=True),
    Fault("SIGSTOP", f"signal:{int(signal.SIGSTOP)}", journal=GONE + SILENT, status=SILENT,
          deadline=PING_S + SLICE_S, loses_gpu=True),
    Fault("SIGSEGV", f"signal:{int(signal.SIGSEGV)}", journal=GONE + "it was killed by signal 11",
          status="killed by signal 11", loses_gpu=True),
    Fault("out of memory", "memory", ("memory:2",), "", "not enough memory"),
    Fault("VK_ERROR_DEVICE_LOST", "arm", ("vk_lost:2",), GONE + LOST, LOST, loses_gpu=True),
    Fault("VK_ERROR_OUT_OF_DEVICE_MEMORY", "arm", ("vk_memory:2",), "",
          "the GPU has no memory left"),
    Fault("compile never returns", "compile", (f"compile_hang:{COMPILER}",), GONE + SILENT,
          "the driver's compiler did not return", PING_S + PIPELINE_S, True, True),
    Fault("compile aborts", "compile", (f"compile_abort:{COMPILER}",),
          GONE + "it was killed by signal 6", "the driver's compiler ended the worker", 0.0,
          True, True),
    Fault("wrong results", "wrong", (), "does not use .* any more: ", "while serving", fresh=True),
    Fault("NaN logits", "arm", ("nan_logits:2",), GONE + LOST, LOST, loses_gpu=True,
          quiet=("video",)),
    Fault("udev remove", "udev:remove", ("node:128",),
          "the gpu worker is ended: /dev/dri/renderD128 was", "renderD128 was removed",
          loses_gpu=True),
    Fault("WEDGED event", "udev:wedged", ("node:128",), f"the gpu worker is ended: {HUNG}", HUNG,
          loses_gpu=True),
    Fault("full state directory", "full"),
    Fault("clock jump", "clock"),
    Fault("client killed", "rude:sit"),
    Fault("client stops reading", "rude:deaf"),
    Fault("client sends garbage", "rude:garbage"),
    Fault("bus restart", "bus"),
    Fault("pvrd killed", "pvrd"),
)  # fmt: skip
