# SPDX-License-Identifier: Apache-2.0
"""The Wayland player in a headless Weston; docs/player.png is a picture that such a run made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.examples.weston import ROOT, in_weston

pytestmark = pytest.mark.bus

SCRIPT = """
ffmpeg -v error -f lavfi -i testsrc2=size=200x120:rate=25 -t 0.2 -pix_fmt yuv420p c.y4m
timeout 60 "$@" c.y4m --hold >said &
player=$!
read -r answer <said
weston-screenshooter
kill $player
echo "$answer"
"""


def test_a_clip_in_a_window(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    command = [sys.executable, str(ROOT / "examples/player.py")]
    assert in_weston(SCRIPT, command, {"PYTHONPATH": str(ROOT)}, picture) == "5 frames\n"
    colours = Image.open(picture).convert("RGB").getcolors(1 << 20) or []
    assert len(colours) > 1000  # the clip's, not a black window on the desktop
