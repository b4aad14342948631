# SPDX-License-Identifier: Apache-2.0
"""The clients under examples/ work against a real daemon and the CPU worker."""

from __future__ import annotations

import os
import re
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


def test_the_readmes_commands(tmp_path: Path) -> None:
    """Those that need no window, as they stand there; the windows have tests of their own."""
    text = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|.*\| `(.+)` \|$", text, re.M)
    told = {name.rstrip("/") for name, _ in rows} | {"writer.py", "README.md"}
    assert told == {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    commands = [
        command.replace("/tmp/", f"{tmp_path}/").replace(".venv/bin/python", sys.executable)
        for name, command in rows
        if name not in ("player.py", "gtk_summary.py", "qt_summary.py")
    ]
    assert len(commands) == 5
    out = with_pvrd("sh", "-ec", "\n".join(["cd " + str(ROOT), *commands]))
    assert "Paris" in out
    assert '"intent": "climate_on"' in out
    assert "frame 1 on the cpu" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["NONE"], "No such file"),
        (["TEXT"], "not a y4m stream"),
        (["DEEP"], "not 8-bit 4:2:0"),
        (["CLIP"], "WAYLAND_DISPLAY is not set"),
        ([], "usage: player.py"),
    ],
)
def test_the_player_says_what_is_wrong(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "TEXT").write_text("a text, and no clip")
    for name, colour in (("CLIP", "420"), ("DEEP", "420p10")):
        (tmp_path / name).write_bytes(f"YUV4MPEG2 W16 H16 F25:1 C{colour}\n".encode())
    env = {k: v for k, v in os.environ.items() if k not in ("WAYLAND_DISPLAY", "DISPLAY")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "player.py"), *arguments],
        env={**env, "PYTHONPATH": str(ROOT)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
