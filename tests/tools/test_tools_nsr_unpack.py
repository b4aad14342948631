# SPDX-License-Identifier: Apache-2.0
"""The weights in a model file can be taken out and put in again: they are the checkpoints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools/train_nsr"
MODELS = ROOT / "engine/video/models"


@pytest.mark.parametrize("name", ["nsr-fast-x3", "nsr-quality-x4"])
def test_what_unpack_takes_out_exports_to_the_same_file(tmp_path: Path, name: str) -> None:
    model, luma, chroma = MODELS / f"{name}.pvrm", tmp_path / "y.npz", tmp_path / "c.npz"
    again = tmp_path / f"{name}.pvrm"
    for tool, *files in (("unpack.py", model, luma, chroma), ("export.py", luma, chroma, again)):
        command = [sys.executable, str(TOOLS / str(tool)), *map(str, files)]
        subprocess.run(command, check=True, env={"PYTHONPATH": str(ROOT)}, timeout=60)
    assert again.read_bytes() == model.read_bytes()
