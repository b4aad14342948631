# SPDX-License-Identifier: Apache-2.0
"""Programs with a window, in a headless Weston beside a daemon of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_START = """
weston --backend=headless-backend.so --socket=wl-pvrd --idle-time=0 --use-pixman --debug \\
    --width=640 --height=480 >weston.log 2>&1 &
weston=$!
trap 'kill $weston' EXIT
until [ -S "$XDG_RUNTIME_DIR/wl-pvrd" ]; do kill -0 $weston || exit 9; sleep 0.05; done
export WAYLAND_DISPLAY=wl-pvrd DBUS_SESSION_BUS_ADDRESS=$PVRD_BUS
mkfifo said
"""


def in_weston(
    script: str, command: list[str], env: Mapping[str, str], picture: Path | None = None
) -> str:
    """Runs a script of bash whose arguments are `command`, in a folder of its own with a FIFO
    `said`; its standard output. The one picture that it takes is moved to `picture`."""
    folder = Path(tempfile.mkdtemp(prefix="pvrd-win-"))  # a socket's path may have 107 bytes
    try:
        done = subprocess.run(
            [str(ROOT / "tools/with-pvrd"), "bash", "-c", _START + script, "bash", *command],
            cwd=folder, env={**os.environ, **env, "XDG_RUNTIME_DIR": str(folder)},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        if picture is not None:
            (taken,) = folder.glob("wayland-screenshot-*.png")
            shutil.move(taken, picture)
        return done.stdout
    finally:
        shutil.rmtree(folder)


# -- the two summaries: the same window by two toolkits

_SUMMARY = """
timeout 60 "$@" --tokens 16 --press >said &
app=$!
read -r answer <said
weston-screenshooter
kill $app
echo "$answer"
"""
# What a job leaves behind: the jobs and sessions that there are, the counters.
_LEFT = "pvrctl jobs --json && pvrctl stats --json"
_BROKEN_OFF = f"""
timeout 60 "$@" --tokens 200 --press --cancel-at 3 >said &
app=$!
read -r answer <said
{_LEFT}
kill $app || exit 8
wait $app
timeout 60 "$@" --tokens 200 --press --close-at 3 >/dev/null && {_LEFT}
echo "$answer"
"""


def check_summary(command: list[str], env: Mapping[str, str], picture: Path) -> None:
    """The window shows a summary, which the program prints, too; PVRD_KEEP_PICTURE keeps it."""
    assert in_weston(_SUMMARY, command, env, picture).strip()
    assert picture.read_bytes().startswith(b"\x89PNG")
    if kept := os.environ.get("PVRD_KEEP_PICTURE"):
        shutil.copy(picture, kept)


def check_cancelling(command: list[str], env: Mapping[str, str]) -> None:
    """The Cancel button in the middle of an answer cancels the job, and the window stays; so does
    closing the window, and the program ends."""
    out, _, answer = in_weston(_BROKEN_OFF, command, env).rstrip().rpartition("\n")
    assert answer == "Cancelled."
    decoder = json.JSONDecoder()
    for cancelled in (1, 2):
        jobs, end = decoder.raw_decode(out)
        counters, after = decoder.raw_decode(out[end:].lstrip())
        out = out[end:].lstrip()[after:].lstrip()
        assert jobs == []
        assert counters["sessions"] == 0
        assert (counters["jobs"]["cancelled"], counters["jobs"]["done"]) == (cancelled, 0)
