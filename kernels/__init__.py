# SPDX-License-Identifier: Apache-2.0
"""Compute kernels: one operation, one folder (op.py the contract, op.comp GLSL, op.c C with
OpenMP).
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from pathlib import Path
from typing import Any

from kernels.contract import Contract

_HERE = Path(__file__).resolve().parent


@functools.cache
def artifacts() -> Path:
    """The folder with libpvrkernels.so, *.spv and manifest.json: beside this file when installed,
    else build/.

    Raises:
        FileNotFoundError: the kernels have not been built.
    """
    places = [_HERE, _HERE.parent / "build" / "kernels"]
    if env := os.environ.get("PVRD_KERNELS"):
        places.insert(0, Path(env))
    for place in places:
        if (place / "libpvrkernels.so").exists():
            return place
    raise FileNotFoundError(
        "the kernels are not built: run `make` in the project, or set PVRD_KERNELS to a build"
    )


@functools.cache
def manifest() -> dict[str, dict[str, dict[str, Any]]]:
    """What each compiled variant asks of a device, by operation and variant: see
    kernels/build_spirv.py.

    Raises:
        FileNotFoundError: the kernels have not been built.
    """
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(
        (artifacts() / "manifest.json").read_text("utf-8")
    )
    return found


@functools.cache
def op(name: str) -> Contract:
    """The contract of an operation.

    Raises:
        ModuleNotFoundError: there is no such operation.
    """
    contract = importlib.import_module(f"kernels.{name}.op").OP
    assert isinstance(contract, Contract)
    return contract
