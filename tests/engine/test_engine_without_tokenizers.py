# SPDX-License-Identifier: Apache-2.0
"""Where the tokenizers library is missing (a distribution's own packages), only text models are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.engine.conftest import write_model

ROOT = Path(__file__).resolve().parents[2]

_CODE = """
import sys
sys.modules["tokenizers"] = None
import pvrd.workers.models, pvrd.workers.loop, pvrd.workers.video_jobs
from engine.errors import UnsupportedModel
from engine.text import compiled
with open(sys.argv[1], "rb") as file:
    try:
        compiled.inspect(file.fileno())
    except UnsupportedModel as error:
        print(error)
"""


def test_a_worker_still_loads(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_model(file, "F16")
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(file)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "Text models need the Python package tokenizers, which is not installed.\n"
    )
