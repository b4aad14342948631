# SPDX-License-Identifier: Apache-2.0
"""The table in docs/powervr.md: what the compiler makes of each variant on each core, and what
counts as worse than that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

BEGIN = "<!-- the table: written by `make powervr KEEP=1` -->"
END = "<!-- end of the table -->"

State = Literal["ok", "refused", "aborted", "hung", "gated"]
Key = tuple[str, str, str]  # core, operation, variant

_CELL = re.compile(r"(\d+) / (\d+) / (\d+)(?: \+(\d+) B)?")
_FAILED = ("refused", "aborted", "hung")


@dataclass(frozen=True)
class Row:
    """One variant on one core: instruction groups, temporary registers a thread, registers spilled
    to memory, bytes of scratch memory. `detail` is the gate's or the driver's reason.
    """

    state: State
    baseline: bool
    groups: int = 0
    temps: int = 0
    spills: int = 0
    scratch: int = 0
    detail: str = ""

    def cell(self) -> str:
        """The row as a cell of the table; `parse` reads it."""
        if self.state != "ok":
            return self.state
        scratch = f" +{self.scratch} B" if self.scratch else ""
        return f"{self.groups} / {self.temps} / {self.spills}{scratch}"


Table = Mapping[Key, Row]


def from_statistics(statistics: Mapping[str, int], baseline: bool) -> Row:
    """A row from the driver's statistics.

    Raises:
        KeyError: the driver calls them otherwise.
    """
    return Row(
        "ok",
        baseline,
        groups=statistics["Inst group count"],
        temps=statistics["Temp count"],
        spills=statistics["Spill count"],
        scratch=statistics["Scratch size"],
    )


def render(table: Table, cores: Mapping[str, str], sources: str) -> str:
    """The table in Markdown, between its two marks. `cores` maps core names to headings."""
    variants = sorted({(op, variant) for _, op, variant in table})
    lines = [
        BEGIN,
        "",
        f"From {sources}. Cells: instruction groups / temporary registers / registers spilled.",
        "",
        f"| operation | variant | kind | {' | '.join(cores.values())} |",
        f"|---|---|---|{'---|' * len(cores)}",
    ]
    for op, variant in variants:
        rows = [table[core, op, variant] for core in cores]
        kind = "baseline" if rows[0].baseline else "extra"
        cells = " | ".join(row.cell() for row in rows)
        lines.append(f"| `{op}` | `{variant}` | {kind} | {cells} |")
    lines += ["", END]
    return "\n".join(lines)


def parse(text: str, cores: Mapping[str, str]) -> dict[Key, Row]:
    """The table in a Markdown file; empty when the file has none.

    Raises:
        ValueError: a line of it cannot be read.
    """
    inside = text.partition(BEGIN)[2].partition(END)[0]
    names = {heading: core for core, heading in cores.items()}
    table: dict[Key, Row] = {}
    order: list[str] = []
    for line in inside.splitlines():
        if not line.startswith("|") or line.startswith("|-"):
            continue
        words = [word.strip() for word in line.strip("|").split("|")]
        if words[0] == "operation":
            order = [names[heading] for heading in words[3:] if heading in names]
            continue
        op, variant, kind, *cells = words
        if len(cells) != len(order):
            raise ValueError(f"the table has {len(order)} cores, but a line reads {line!r}")
        for core, cell in zip(order, cells, strict=True):
            table[core, op.strip("`"), variant.strip("`")] = _row(cell, kind == "baseline")
    return table


def _row(cell: str, baseline: bool) -> Row:
    if found := _CELL.fullmatch(cell):
        groups, temps, spills, scratch = (int(n or 0) for n in found.groups())
        return Row("ok", baseline, groups, temps, spills, scratch)
    for state in ("refused", "aborted", "hung", "gated"):
        if cell == state:
            return Row(state, baseline)
    raise ValueError(f"no cell of the table: {cell!r}")


def insert(text: str, rendered: str) -> str:
    """The Markdown text with its table replaced.

    Raises:
        ValueError: it has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("docs/powervr.md has lost the marks around its table")
    return before + rendered + after


def faults(table: Table) -> list[str]:
    """What no baseline kernel may do on any core, whatever the kept table says."""
    out = []
    for (core, op, variant), row in sorted(table.items()):
        name = f"{core}: {op}.{variant} (baseline)"
        if not row.baseline:
            continue
        if row.state != "ok":
            out.append(f"{name}: {row.state}: {row.detail}")
        elif row.spills:
            out.append(f"{name} spills {row.spills} registers")
        elif row.scratch:
            out.append(f"{name} uses {row.scratch} bytes of scratch memory")
    return out


def regressions(kept: Table, table: Table) -> list[str]:
    """What is worse than in the kept table: more spills, more scratch, or no longer compiled. A
    variant that is not in the table may not spill.
    """
    out = []
    for key, row in sorted(table.items()):
        core, op, variant = key
        name = f"{core}: {op}.{variant}"
        old = kept.get(key, Row("ok", row.baseline))
        if old.state == "ok" and row.state in _FAILED:
            out.append(f"{name}: {row.state}, compiled before: {row.detail}")
        if row.state == "ok" and row.spills > old.spills:
            out.append(f"{name} spills {row.spills} registers, {old.spills} before")
        if row.state == "ok" and row.scratch > old.scratch:
            out.append(f"{name} uses {row.scratch} bytes of scratch memory, {old.scratch} before")
    return out


def changes(kept: Table, table: Table, seen: Sequence[str]) -> list[str]:
    """What differs from the kept table and is no fault; `seen` are the cores of this run."""
    out = []
    for key in sorted(kept.keys() | table.keys()):
        core, op, variant = key
        if core not in seen:
            continue
        old = kept[key].cell() if key in kept else "not in the table"
        new = table[key].cell() if key in table else "gone"
        if old != new:
            out.append(f"{core}: {op}.{variant}: {old} -> {new}")
    return out
