# SPDX-License-Identifier: Apache-2.0
"""How a worker begins: its device is opened, and pvrd hears in the hello what it is.

From then on pvrd also hears what happens to the GPU's kernels, before the driver gets one: a
worker that a driver takes with it can say nothing afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from engine.backends.base import Backend
from pvrd.workers import devices, faults, protocol
from pvrd.workers.failures import Send, report
from pvrd.workers.neighbour import Neighbour

Open = Callable[[str, Mapping[str, Any]], devices.Opened]


def greet(
    kind: str, generation: int, config: Mapping[str, Any], opener: Open, send: Send
) -> tuple[Backend | None, Neighbour | None]:
    """Opens the device and says hello.

    Returns:
        The device, None where there is none, and how to live beside the desktop where it runs on
        the CPU.
    """
    neighbour = None
    try:
        wanted = faults.parse(config.get("faults") or (), kind, generation)
        if "no_device" in wanted.at:
            opened = devices.Opened(None, "there is no device (a fault of the test)", "failed")
        else:
            opened = opener(kind, config)
    except Exception as e:  # a driver may fail in any way; there is an answer all the same
        report(e)
        why = " ".join(str(e).split())[:200] or type(e).__name__  # no prompt was here yet
        opened = devices.Opened(None, f"the device could not be opened: {why}", "failed")
    backend, described = opened.backend, None
    if backend is not None:
        described = devices.describe(backend.info, devices.quarantined(backend))
        if nodes := wanted.node():
            described["properties"] = {**described["properties"], "nodes": nodes}
        if backend.info.software:  # the CPU, or a GPU that is one
            neighbour = Neighbour()
            neighbour.keep_to(devices.cores(config).cpus)
        wanted.arm()
    send(
        {
            "t": "hello",
            "protocol": protocol.PROTOCOL,
            "pid": os.getpid(),
            "device": described,
            "reason": opened.reason,
            "code": opened.code,
        }
    )
    if backend is None:
        return None, None
    if (listen := getattr(backend, "listen", None)) is not None:
        listen(_teller(backend, wanted, send))
    if hasattr(backend, "announce"):
        backend.announce = lambda on: send({"t": "busy", "on": on})
    return faults.FaultyBackend(backend, wanted) if wanted.at else backend, neighbour


def _teller(backend: Backend, wanted: faults.Faults, send: Send) -> Callable[[str, str, str], None]:
    """Tells pvrd what happens to a kernel of the GPU, before the driver gets it."""

    def tell(what: str, name: str, reason: str) -> None:
        if what == "trying":
            send({"t": "busy", "on": True, "kernel": name})
            wanted.compiling(name)
        elif what == "tried":
            send({"t": "busy", "on": True})  # whatever happens now is not its doing
        else:
            send({"t": "quarantine", "kernels": devices.quarantined(backend)})

    return tell
