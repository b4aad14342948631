# SPDX-License-Identifier: Apache-2.0
"""The clients under examples/ work against a real daemon and the CPU worker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.bus


def with_pvrd(*command: str) -> str:
    """Runs a command beside a private daemon; its standard output."""
    env = dict(os.environ)
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        [str(ROOT / "tools/with-pvrd"), *command],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_text_from_python_with_gio() -> None:
    example = str(EXAMPLES / "text_gio.py")
    out = with_pvrd("/usr/bin/python3", example, "-n", "16", "Count from one to ten.")
    assert out.startswith("1. 1\n2. 2\n")


def test_video_from_c_with_sd_bus(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or "gcc"
    query = ["pkg-config", "--cflags", "--libs", "libsystemd"]
    flags = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    program = tmp_path / "video_sdbus"
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-o", str(program)]
    subprocess.run([*command, str(EXAMPLES / "video_sdbus.c"), *flags], check=True)
    head, _, pixels = with_pvrd(str(program)).partition(":")
    assert head == "frame 1 on the cpu, 128x96"
    # The input is the ramp 16 + 3x; output pixel X lies at input (X + 0.5) / 2 - 0.5.
    for x, value in enumerate(pixels.split(), start=40):
        assert abs(int(value) - (16 + 3 * ((x + 0.5) / 2 - 0.5))) <= 2


def test_state_from_shell_with_busctl() -> None:
    out = with_pvrd("sh", str(EXAMPLES / "status.sh"))
    assert '"cpu"' in out.partition("models:")[0]
    assert "smollm2-135m-instruct" in out
    assert out.partition("text:\n")[2].strip()
