# SPDX-License-Identifier: Apache-2.0
"""The voice assistant's text end on the CPU: from a sentence to its intent and slots.

    python -m benchmarks.text_assistant [--quick] [--json] [--threads N] [--sentences FILE]

The example (examples/assistant) with SmolLM2 over a daemon of its own, with the CPU alone. Rows are
the 95th percentile and the median of the milliseconds by the clock, and of what the client, pvrd
and its worker together have of CPUs in that time (with one thread more than what a quiet machine
takes, and no less where others load it), against the 800 ms that a talker waits; and the shares of
intents and slots that were right. --quick takes every fifth sentence.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import statistics
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import common
from benchmarks.text_cpu import smollm2
from tests.faults.daemon import Daemon

TARGET_MS = 800.0
HERE = common.ROOT / "examples" / "assistant"


def example() -> ModuleType:
    """The example's module, which is in no package."""
    spec = importlib.util.spec_from_file_location("assistant", HERE / "assistant.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cpu_s(pid: int) -> float:
    """Seconds that a process has had on CPUs (its clock: clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


def percentile(times: list[float], share: float) -> float:
    """The least time that so large a share of all does not pass."""
    return sorted(times)[math.ceil(share * len(times)) - 1]


def judged(
    module: ModuleType, assistant: Any, cases: list[dict[str, Any]], pids: list[int]
) -> tuple[list[float], list[float], list[bool], list[bool]]:
    """Milliseconds by the clock and on CPUs of each sentence; which intents and slots are right."""
    wall, cpu, intents, slots = [], [], [], []
    for case in cases:
        before, began = sum(map(cpu_s, pids)), time.perf_counter()
        got = assistant.understand(case["text"])
        wall.append(1e3 * (time.perf_counter() - began))
        cpu.append(1e3 * (sum(map(cpu_s, pids)) - before))
        intents.append(got.intent == case["intent"])
        slots += [
            intents[-1] and module._alike(got.slots.get(name), value)
            for name, value in case.get("slots", {}).items()
        ]
    return wall, cpu, intents, slots


def measure(args: argparse.Namespace) -> list[common.Row]:
    module = example()
    rules = tomllib.loads((HERE / "car.toml").read_text(encoding="utf-8"))
    text = Path(args.sentences).read_text(encoding="utf-8")
    cases = tomllib.loads(text)["utterance"][:: 5 if args.quick else 1]
    with tempfile.TemporaryDirectory() as folder:
        config = {"gpu.enabled": False, "governor.enabled": False, "cpu.threads": args.threads}
        daemon = Daemon(Path(folder), smollm2().parent, config)
        daemon.start()
        try:
            with daemon.client() as client:
                worker = daemon.ready(client, "cpu")
                with client.open_text({"device": "cpu", "context": 512}) as session:
                    for _ in session.loading():
                        pass
                    assistant = module.Assistant(session, rules)
                    pids = [os.getpid(), daemon.pid, int(worker["pid"])]
                    wall, cpu, intents, slots = judged(module, assistant, cases, pids)
        finally:
            daemon.stop()
    print(f"{len(cases)} sentences; load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    rows = []
    for unit, times in (("ms", wall), ("ms of CPU", cpu)):
        rows.append(common.row("p95", unit, percentile(times, 0.95), TARGET_MS, "target"))
        rows.append(common.row("median", unit, statistics.median(times), TARGET_MS, "target"))
    for name, right in (("intents", intents), ("slots", slots)):
        share = 100 * sum(right) / max(1, len(right))
        rows.append(common.row(f"{name} ({len(right)})", "% right", share, None, "no peer"))
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sentences", default=str(HERE / "utterances.toml"))


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure, options))
