# SPDX-License-Identifier: Apache-2.0
"""The GTK example in a headless Weston; docs/gtk_summary.png is a picture that such a run made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.bus

SCRIPT = """
weston --backend=headless-backend.so --socket=wl-pvrd --idle-time=0 --use-pixman --debug \\
    --width=640 --height=480 >weston.log 2>&1 &
weston=$!
trap 'kill $weston' EXIT
until [ -S "$XDG_RUNTIME_DIR/wl-pvrd" ]; do kill -0 $weston || exit 9; sleep 0.05; done
export WAYLAND_DISPLAY=wl-pvrd DBUS_SESSION_BUS_ADDRESS=$PVRD_BUS
mkfifo said
timeout 60 /usr/bin/python3 "$1" --tokens 16 --press >said &
app=$!
read -r answer <said
weston-screenshooter
kill $app
echo "$answer"
"""


def test_a_summary_in_gtk() -> None:
    folder = Path(tempfile.mkdtemp(prefix="pvrd-gtk-"))
    site = Path(sys.prefix) / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    env = {
        **os.environ, "XDG_RUNTIME_DIR": str(folder), "GDK_BACKEND": "wayland",
        "GSK_RENDERER": "cairo", "GSETTINGS_BACKEND": "memory", "GTK_A11Y": "none",
        "PYTHONPATH": f"{ROOT}:{site}", "PATH": f"{os.environ['PATH']}",
    }  # fmt: skip
    try:
        done = subprocess.run(
            [str(ROOT / "tools/with-pvrd"), "bash", "-c", SCRIPT, "bash",
             str(ROOT / "examples/gtk_summary.py")],
            cwd=folder, env=env, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        pictures = list(folder.glob("wayland-screenshot-*.png"))
        assert len(pictures) == 1
        assert pictures[0].read_bytes().startswith(b"\x89PNG")
        if kept := os.environ.get("PVRD_KEEP_PICTURE"):
            shutil.copy(pictures[0], kept)
    finally:
        shutil.rmtree(folder)
