# SPDX-License-Identifier: Apache-2.0
"""docs/api.md has each method, property, option and key of the configuration, with its type and
default, and no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pvrd import options
from pvrd.config import KEYS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/api.md").read_text(encoding="utf-8")
TYPES = {"bool": "b", "float": "d", "str": "s", "strs": "as", "numbers": "a{ud}"}


def section(title: str) -> str:
    """What stands below a heading, or below what a paragraph begins with, up to the next one."""
    return TEXT.partition(title)[2].partition("\n## ")[0].partition("\n**")[0]


def rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """The rows of tables, one for each name where several share one: name and other cells."""
    for line in text.splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| ") or not re.fullmatch(r"[a-z0-9_., ]+", first):
            continue
        if first in ("option", "key"):
            continue
        names = first.split(", ")
        shared = [cell.split(", ") for cell in cells]
        for n, name in enumerate(names):
            if "." in first and "." not in name:
                name = f"{first.partition('.')[0]}.{name}"
            one = [each[n] if len(each) == len(names) else ", ".join(each) for each in shared[:-1]]
            yield name, [*one, cells[-1]]


def written(value: Any) -> str:
    """A default as the tables have it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)


@pytest.mark.parametrize(
    ("title", "table"),
    [
        ("**OpenText(", options.TEXT_SESSION),
        ("**OpenVideo(", options.VIDEO_SESSION),
        ("one job a session at a time", options.TEXT_JOB),
    ],
)
def test_options(title: str, table: dict[str, options.Option]) -> None:
    found = dict(rows(section(title)))
    assert set(found) == set(table)
    for name, option in table.items():
        kind, default = found[name][:2]
        whole = "t" if option.high >= 1 << 32 else "u"
        if found[name][2] == "as above":
            continue
        assert kind == TYPES.get(option.kind, whole), name
        if option.default not in (None, "", (), {}) and default:
            assert default.replace('"', "") == written(option.default).replace('"', ""), name


def test_keys_of_the_configuration() -> None:
    found = dict(rows(section("## Configuration")))
    assert set(found) == set(KEYS)
    for key, rule in KEYS.items():
        default, note = found[key]
        assert default == written(rule.default), key
        assert (note.partition(";")[0] == "s") == rule.settable, key


def test_methods_and_properties() -> None:
    for name in ("Manager", "TextSession", "VideoSession"):
        xml = (ROOT / f"dbus/org.pvrd.Pvrd1.{name}.xml").read_text(encoding="utf-8")
        members = re.findall(r'<(?:method|property) name="(\w+)"', xml)
        assert members
        own = TEXT.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for member in members:
            assert re.search(rf"\b{member}\b", own), (name, member)
