# SPDX-License-Identifier: Apache-2.0
"""How pvrctl speaks: tables and sentences for people, one JSON object for programs, progress for
terminals."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

_json_on_stderr = False


def json_on_stderr() -> None:
    """From here on standard output carries data: JSON goes to standard error."""
    global _json_on_stderr
    _json_on_stderr = True


def emit_json(value: Any) -> None:
    """Prints one JSON value on a line of its own."""
    stream = sys.stderr if _json_on_stderr else sys.stdout
    # JSON has signs of its own for what another encoding lacks.
    foreign = (stream.encoding or "").lower().replace("-", "") != "utf8"
    stream.write(json.dumps(value, ensure_ascii=foreign) + "\n")
    stream.flush()


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Columns padded to their widest cell, two blanks between them; the last column is not
    padded."""
    lines = [list(head), *map(list, rows)] if head else [list(row) for row in rows]
    if not lines:
        return ""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )


def size(count: int | float) -> str:
    """Bytes for people: 1.5 MB, powers of 1000."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def rate(count: float) -> str:
    """A speed with three significant figures at most."""
    return f"{count:.0f}" if count >= 100 else f"{count:.1f}" if count >= 10 else f"{count:.2f}"


def plain(text: str) -> str:
    """Text from the daemon or a file, safe for a terminal: control characters but newline and tab
    are shown as ?."""
    return "".join(char if char in "\n\t" or not _control(char) else "?" for char in text)


def sentence(text: str) -> str:
    """A message of the daemon in one line, with a capital and a full stop; pvrd itself, keys and
    names of files stay as they are written."""
    line = plain(" ".join(text.split()))
    first = line.partition(" ")[0]
    if first.isalpha() and first not in ("pvrd", "pvrctl"):
        line = f"{line[:1].upper()}{line[1:]}"
    return line + ("" if line.endswith((".", "!", "?")) else ".")


def _control(char: str) -> bool:
    return ord(char) < 32 or 127 <= ord(char) < 160


def warn(text: str) -> None:
    """A remark on stderr that ends nothing."""
    sys.stderr.write(f"pvrctl: {text}\n")


class Progress:
    """A line on stderr that is written over; silent where stderr is no terminal."""

    def __init__(self, label: str, shown: bool | None = None) -> None:
        self._label = label
        self._shown = os.isatty(2) if shown is None else shown
        self._last = 0.0
        self._width = 0

    def update(self, done: float, total: float | None = None, unit: str = "") -> None:
        """Shows done of total, at most ten times a second; without a total the count alone."""
        now = time.monotonic()
        if not self._shown or (now - self._last < 0.1 and done != total):
            return
        self._last = now
        if total:
            filled = int(20 * min(done / total, 1))
            count = f" {done:.0f}/{total:.0f} {unit}" if unit else f" {100 * done / total:.0f}%"
            text = f"{self._label} [{'#' * filled}{'.' * (20 - filled)}]{count}"
        else:
            text = f"{self._label} {done:.0f} {unit}"
        sys.stderr.write("\r" + text.rstrip().ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def clear(self) -> None:
        """Wipes the line."""
        if self._shown and self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0
