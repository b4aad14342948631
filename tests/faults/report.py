# SPDX-License-Identifier: Apache-2.0
"""python -m tests.faults.report [-k WORDS]: runs the fault matrix, prints it and writes
docs/faults.md. With -k (as pytest's) only what is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.faults.cells import FAULTS
from tests.faults.daemon import ROOT
from tests.faults.work import STATES

TARGET = ROOT / "docs" / "faults.md"
_HEAD = """# The fault matrix

Written by `python -m tests.faults.report`; `make check-long` runs the same cells (`tests/faults`). Each cell is a real pvrd on a bus
of its own, with its CPU worker and a GPU worker on a software GPU (30 ms more a submission, so that faults find work under way), a text
model of 100,000 weights and frames of 96x64. It holds if

- each token and frame came once, in order, the ids equal to those of an undisturbed CPU, the frames within 1 step of the engine's own;
- what had stopped went on within deadline + load and prefill (measured at the start of the row) + 1 s, and the GPU served again;
- pvrd and its workers hold no more fds, memory, processes, jobs, sessions or files than before;
- the reason stands in the status (properties, statistics, the stream) and in the journal;
- "bus restart" and "pvrd killed": end of file within 1 s, no process or temporary file stays, a new pvrd answers within 10 s.

A cell says when the last stream went on after the fault (seconds), and in brackets when the GPU, or the service, was back.
Deadlines are shortened: 3 s a slice, 5 s a pipeline, 0.2 s between pings. How faults are made:

- signals go to the GPU's worker; "out of memory" limits its address space to what it has, and its next submission needs more (MemoryError);
- VkResults are what the driver's calls answer from the second submission on (`debug.faults`, `vk_lost`, `vk_memory`); NaN logits likewise
  (a video has none: nothing may happen);
- the compiler hangs or aborts over a kernel that another client's video needs while the work is under way; wrong results are those of kernels
  that were compiled from changed sources and pass their self-test (decode: from position 30 on, named by `suspect` lines);
- udev's events come from umockdev, for a worker that says that it is renderD128; udev's `add` follows;
- the clock jumps a day ahead and back, and the disk is full, by a preloaded library (`tests/faults/preload.c`): CLOCK_REALTIME belongs to no
  time namespace, and tests set no machine's clock;
- ill-behaved clients are processes of their own, and the work is that of another client beside them: it must be as ever.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the fault matrix.")
    parser.add_argument("-k", default="", help="only these cells, as pytest's -k")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "report.json"
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "tests/faults", "-q", "-m", "long"]
        done = subprocess.run(
            [*command, *(["-k", args.k] if args.k else [])],
            env={**os.environ, "PVRD_FAULT_REPORT": str(found)}, cwd=ROOT, check=False,
        )  # fmt: skip
        cells = json.loads(found.read_text()) if found.exists() else []
    text = _HEAD + table(cells) + reasons(cells) + summary(cells, time.monotonic() - began)
    print(text)
    if not args.k and cells:
        TARGET.write_text(text)
    return done.returncode


def table(cells: list[dict[str, Any]]) -> str:
    """Faults by states."""
    known = {(c["fault"], c["state"]): c for c in cells}
    names = [state.name for state in STATES]
    lines = ["| fault | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for fault in FAULTS:
        row = [known.get((fault.name, name)) for name in names]
        if any(row):
            lines.append(f"| {fault.name} | " + " | ".join(map(_cell, row)) + " |")
    return "\n".join(lines) + "\n"


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    if not cell["passed"]:
        return "FAILED: " + cell["error"]
    back = f" ({cell['back_s']:.1f})" if cell["back_s"] else ""
    return f"{cell['went_on_s']:.2f}{back}"


def reasons(cells: list[dict[str, Any]]) -> str:
    """What a reader of the status or the journal finds."""
    lines = ["", "| fault | reason that is told |", "|---|---|"]
    for fault in FAULTS:
        told = [c["reason"] for c in cells if c["fault"] == fault.name and c["reason"]]
        if told:
            lines.append(f"| {fault.name} | {min(told, key=len)[:160]} |")
    return "\n".join(lines) + "\n"


def summary(cells: list[dict[str, Any]], seconds: float) -> str:
    """How many, how long."""
    passed = sum(c["passed"] for c in cells)
    return f"\n{passed} of {len(cells)} cells hold; {seconds / 60:.1f} minutes.\n"


if __name__ == "__main__":
    sys.exit(main())
