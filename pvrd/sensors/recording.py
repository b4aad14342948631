# SPDX-License-Identifier: Apache-2.0
"""Snapshots as lines of JSON: what a machine's day was like, to be decided on again.

A line has the fields that are not at their defaults; `unknown` is left out, since a field that is
absent is unknown.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pvrd.governor import Snapshot

_FIELDS = {f.name: f for f in dataclasses.fields(Snapshot)}
_NEVER = ("unknown",)


def dump(snapshot: Snapshot, sources: bool = True) -> str:
    """One line, without its end."""
    values: dict[str, Any] = {"time_s": snapshot.time_s}
    for name, rule in _FIELDS.items():
        value = getattr(snapshot, name)
        default = () if name == "holds" else {} if name == "sources" else rule.default
        if name in _NEVER or value == default or (name == "sources" and not sources):
            continue
        values[name] = dict(value) if name == "sources" else value
    return json.dumps(values, ensure_ascii=False)


def load(line: str) -> Snapshot:
    """A snapshot out of a line.

    Raises:
        ValueError: it is no JSON object, lacks time_s, or names a field that there is not.
    """
    values = json.loads(line)
    if not isinstance(values, dict) or not isinstance(values.get("time_s"), (int, float)):
        raise ValueError("a snapshot is a JSON object with time_s")
    strange = sorted(set(values) - set(_FIELDS))
    if strange:
        raise ValueError(f"a snapshot has no {strange[0]}")
    if not isinstance(values.get("holds", []), list):
        raise ValueError("holds is a list")
    values["holds"] = tuple(values.get("holds", []))
    return Snapshot(**values)


def read(path: Path) -> Iterator[Snapshot]:
    """The snapshots of a file, in their order; lines that begin with # are left out.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is none, or time goes back; it says which line.
    """
    last = float("-inf")
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.startswith("#") or not line.strip():
                continue
            try:
                snapshot = load(line)
            except ValueError as e:
                raise ValueError(f"{path}, line {number}: {e}") from None
            if snapshot.time_s < last:
                raise ValueError(f"{path}, line {number}: time goes back")
            last = snapshot.time_s
            yield snapshot
