# SPDX-License-Identifier: Apache-2.0
"""Runs probe.c under qemu: one process for each question, under a deadline, since the compiler may
hang or abort.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tools.powervr import sysroot

# Names as drm_stub.c knows them; how people write them.
CORES = {"axe-1-16m": "AXE-1-16M", "bxm-4-64": "BXM-4-64", "bxs-4-64": "BXS-4-64"}

State = Literal["ok", "refused", "aborted", "hung"]


@dataclass(frozen=True)
class Outcome:
    """What became of a pipeline. `statistics` has the driver's names, `detail` its last words."""

    state: State
    statistics: Mapping[str, int] = field(default_factory=dict)
    detail: str = ""


def command(root: Path, core: str, *args: str) -> list[str]:
    """The command line for one question about a core."""
    environment = {
        "LD_PRELOAD": "/pvrd/drm_stub.so",
        "PVRD_POWERVR_CORE": core,
        "PVR_I_WANT_A_BROKEN_VULKAN_DRIVER": "1",
        "VK_DRIVER_FILES": sysroot.ICD,
        "VK_LOADER_LAYERS_DISABLE": "~all~",
        "MESA_SHADER_CACHE_DISABLE": "1",
    }
    sets = [word for k, v in environment.items() for word in ("-E", f"{k}={v}")]
    # Where Debian's package of static ones went, all are static and named without the word.
    qemu = shutil.which("qemu-aarch64-static") or "qemu-aarch64"
    return [qemu, "-L", str(root), *sets, str(root / "pvrd" / "probe"), *args]


def _last_words(stderr: str, lines: int) -> str:
    """The end of what the driver says on stderr, without what it says of itself each time. (A
    compiler that hangs may say one thing a million times.)
    """
    noise = ("FINISHME", "WARNING: powervr is not a conformant")
    words = [x for x in stderr[-4000:].splitlines() if x and not any(n in x for n in noise)]
    return " ".join(words[-lines:])[-400:]


def _ask(root: Path, core: str, deadline: float, *args: str) -> tuple[State, str, str]:
    try:
        done = subprocess.run(
            command(root, core, *args),
            env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline,
            check=False,
        )
    except FileNotFoundError as e:
        raise sysroot.SysrootError("qemu-user-static is not installed") from e
    except subprocess.TimeoutExpired as e:
        said = _last_words((e.stderr or b"").decode("utf-8", "replace"), 1)
        return "hung", "", f"no answer within {deadline:g} s{': ' * bool(said)}{said}"
    last = _last_words(done.stderr, 4)
    if done.returncode < 0 or done.returncode >= 128:
        return "aborted", "", last or f"signal {-done.returncode}"
    if done.returncode:
        return "refused", "", last
    return "ok", done.stdout, last


def info(root: Path, core: str, deadline: float = 60) -> dict[str, Any]:
    """Limits, features and extensions under their names in Vulkan.

    Raises:
        SysrootError: the driver does not come up.
    """
    state, answer, detail = _ask(root, core, deadline, "info")
    if state != "ok":
        raise sysroot.SysrootError(f"the driver does not come up as {core} ({state}): {detail}")
    found = json.loads(answer)
    assert isinstance(found, dict)
    return found


def pipeline(
    root: Path, core: str, spirv: Path, storage: int, push: int, deadline: float = 60
) -> Outcome:
    """Creates the compute pipeline of one SPIR-V file with `storage` storage buffers and `push`
    bytes of push constants.
    """
    state, answer, detail = _ask(
        root, core, deadline, "pipeline", str(spirv.absolute()), str(storage), str(push)
    )
    return Outcome(state, json.loads(answer) if state == "ok" else {}, detail)
