# SPDX-License-Identifier: Apache-2.0
"""Imports go one way, and what speaks to the world outside has one owner (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A package of somebody else's, and the one file that may import it.
OWNERS = {
    "dbus_next": "pvrd/bus.py",
    "vulkan": "engine/backends/vulkan/api/binding.py",
    "systemd": "pvrd/systemd.py",
}
# What of ours a folder does not import. The worker programs are the engine's place in pvrd.
FORBIDDEN = {"kernels": {"engine", "pvrd"}, "engine": {"pvrd"}, "pvrd": {"engine", "kernels"}}
WORKERS = "pvrd/workers/"


def imports(path: Path) -> Iterator[str]:
    """The packages that a file imports anywhere in it, by statement or by importlib with a name
    that begins literally.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield ast.unparse(node.args[0]).lstrip("f").strip("'\"").split(".")[0]


@cache
def sources() -> dict[str, set[str]]:
    """What the project's files import, by their places below its root."""
    paths = [path for folder in FORBIDDEN for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): set(imports(path)) for path in paths}


@pytest.mark.parametrize("package", OWNERS)
def test_one_file_owns_it(package: str) -> None:
    assert [name for name, packages in sources().items() if package in packages] == [
        OWNERS[package]
    ]


def test_imports_go_one_way() -> None:
    for name, packages in sources().items():
        if not name.startswith(WORKERS):
            assert not packages & FORBIDDEN[name.split("/")[0]], name
