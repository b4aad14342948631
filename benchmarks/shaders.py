# SPDX-License-Identifier: Apache-2.0
"""Shaders of benchmarks alone (benchmarks/shaders), compiled when they are wanted."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kernels import build_spirv

FOLDER = Path(__file__).with_suffix("")


def compiled(name: str, defines: Mapping[str, object]) -> bytes:
    """SPIR-V of a file there.

    Raises:
        SystemExit: there is no glslangValidator, or it does not compile.
    """
    tool, env = build_spirv.tool("glslangValidator")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.spv"
        words = [f"-D{key}={value}" for key, value in defines.items()]
        command = [tool, "--target-env", build_spirv.TARGET, "--quiet", *words]
        command += ["-o", str(out), str(FOLDER / name)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stdout}{done.stderr}")
        return out.read_bytes()
