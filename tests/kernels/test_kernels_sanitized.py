# SPDX-License-Identifier: Apache-2.0
"""The kernels' CPU tests under GCC's sanitizers (tools/sanitize.py): no byte beyond a binding, no
undefined behaviour, no race between the threads of a slice.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import sanitize

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

# What each has to find: a bias of 64 elements of which the buffer has 60, and one that lies where
# it is added.
SABOTAGE = """
import sys
import numpy as np
from dataclasses import replace
from engine.backends.cpu import CpuBackend
from engine.program import Binding
from tests.kernels import harness
backend = CpuBackend(threads=2)
arrays = {"b": np.ones(int(sys.argv[1]), np.float32), "y": np.zeros((64, 64), np.float32)}
if sys.argv[2] == "same":
    made = harness.one_call
    def one_call(*given):
        program = made(*given)
        call, = program.sequences["once"]
        both = replace(call, bindings=(call.bindings[1],) * 2)
        return replace(program, sequences={"once": (both,)})
    harness.one_call = one_call
harness.Runner(backend).run("add_bias", "base", {"n": 64}, arrays, tokens=64)
"""
Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The kernels with a sanitizer, in a folder of their own."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind) / "build"
            sanitize.build(kind, folder, faster=kind == "address")
            made[kind] = folder
        return made[kind]

    return get


def run(kind: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        sanitize.command(list(arguments)), env=sanitize.environment(kind, folder),
        cwd=sanitize.ROOT, check=False, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("kind", sorted(sanitize.CHECKS))
def test_sanitized(built: Build, kind: str) -> None:
    done = run(kind, built(kind), *sanitize.PYTEST, *sanitize.KERNELS)
    assert done.returncode == 0, done.stdout[-8000:]
    assert "passed" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("address", ("60", "apart"), "AddressSanitizer: use-after-poison"),
        ("thread", ("64", "same"), "ThreadSanitizer: data race"),
    ],
)
def test_what_they_would_say(
    built: Build, kind: str, arguments: tuple[str, ...], words: str
) -> None:
    done = run(kind, built(kind), "-c", SABOTAGE, "64", "apart")
    assert done.returncode == 0, done.stdout[-8000:]
    done = run(kind, built(kind), "-c", SABOTAGE, *arguments)
    assert done.returncode != 0
    assert words in done.stdout
