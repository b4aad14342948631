# SPDX-License-Identifier: Apache-2.0
"""The Wayland player in a headless Weston; docs/player.png is a picture that such a run made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.bus

SCRIPT = """
weston --backend=headless-backend.so --socket=wl-pvrd --idle-time=0 --use-pixman --debug \\
    --width=640 --height=480 >weston.log 2>&1 &
weston=$!
trap 'kill $weston' EXIT
until [ -S "$XDG_RUNTIME_DIR/wl-pvrd" ]; do kill -0 $weston || exit 9; sleep 0.05; done
ffmpeg -v error -f lavfi -i testsrc2=size=200x120:rate=25 -t 0.2 -pix_fmt yuv420p c.y4m
export WAYLAND_DISPLAY=wl-pvrd
mkfifo said
timeout 60 "$1" "$2" c.y4m --hold >said &
player=$!
read -r answer <said
weston-screenshooter
kill $player
echo "$answer"
"""


def test_a_clip_in_a_window() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pvrd-player-"))
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [str(ROOT / "tools/with-pvrd"), "bash", "-c", SCRIPT, "bash",
             sys.executable, str(ROOT / "examples/player.py")],
            cwd=folder, env=env, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == "5 frames\n"
        (picture,) = folder.glob("wayland-screenshot-*.png")
        colours = Image.open(picture).convert("RGB").getcolors(1 << 20) or []
        assert len(colours) > 1000  # the clip's, not a black window on the desktop
    finally:
        shutil.rmtree(folder)
