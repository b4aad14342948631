# SPDX-License-Identifier: Apache-2.0
"""A sensor's value with its source, and the small files of /proc and /sys that values lie in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

Value = float | bool | str


@dataclass(frozen=True)
class Reading:
    """One value. `name` is a field of governor.Snapshot, or a word for `describe` alone."""

    name: str
    value: Value | None
    source: str  # who told; of an unknown value: why it is unknown
    unit: str = ""

    def described(self) -> dict[str, Value]:
        """As a row for people; "unknown" with the reason when nothing tells."""
        value = "unknown" if self.value is None else self.value
        return {"name": self.name, "value": value, "source": self.source, "unit": self.unit}


def unknown(name: str, why: str, unit: str = "") -> Reading:
    """A value that nothing tells."""
    return Reading(name, None, why, unit)


def text(path: Path) -> str | None:
    """What a small file says, without white space around it; None when it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(65536).decode("utf-8", "replace").strip()
    except OSError:
        return None


def whole(path: Path) -> int | None:
    """The integer in a small file; None when there is none."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None


def entries(folder: Path) -> list[Path]:
    """What lies in a folder, by name; nothing when it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
