# SPDX-License-Identifier: Apache-2.0
"""python -m tests.faults.report [-k WORDS] [--out FILE]: runs the fault matrix, prints it and
writes docs/faults.md. With -k (as pytest's) it prints only; FILE gets what came of the cells.

python -m tests.faults.report --of FILE... [--note TEXT]: writes it from the parts of a run.
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

from tests.faults.daemon import ROOT
from tests.faults.rows import FAULTS
from tests.faults.work import STATES

TARGET = ROOT / "docs" / "faults.md"
HEAD = Path(__file__).with_name("head.md")


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the fault matrix.")
    parser.add_argument("-k", default="", help="only these cells, as pytest's -k")
    parser.add_argument("--out", type=Path, help="a file for the cells, as JSON")
    parser.add_argument("--of", type=Path, nargs="+", help="such files instead of a run")
    parser.add_argument("--note", default="", help="what more to say of it")
    args = parser.parse_args()
    if args.of:
        cells = [cell for path in args.of for cell in json.loads(path.read_text())]
        text = document(cells, sum(c["took_s"] for c in cells))
        TARGET.write_text(text + (args.note + "\n" if args.note else ""))
        return 0 if all(c["passed"] for c in cells) else 1
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "report.json"
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "tests/faults", "-q", "-m", "long"]
        done = subprocess.run(
            [*command, *(["-k", args.k] if args.k else [])],
            env={**os.environ, "PVRD_FAULT_REPORT": str(found)}, cwd=ROOT, check=False,
        )  # fmt: skip
        cells = json.loads(found.read_text()) if found.exists() else []
    text = document(cells, time.monotonic() - began)
    print(text)
    if args.out:
        args.out.write_text(json.dumps(cells))
    if not args.k and cells:
        TARGET.write_text(text)
    return done.returncode


def document(cells: list[dict[str, Any]], seconds: float) -> str:
    """The page."""
    return HEAD.read_text() + table(cells) + reasons(cells) + summary(cells, seconds)


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
