# SPDX-License-Identifier: Apache-2.0
"""Eight live cameras of 640x360 at 25 frames/s through `pvrupscale` in one GStreamer process.

Rows: the processor time that the element itself takes for a frame (a file of one camera, as fast as
it goes; the process's time without what the same pipeline takes with `identity`), against
GStreamer's own `videoscale`; frames a second that reach the sinks of eight live cameras, of 200,
against `videoscale` in the same pipelines; how many of them networks made. The others are scaled
plainly by the element: with a CPU as pvrd's device there is not time for all, and the daemon's work
competes with the process for the cores. Sessions need some seconds to find their levels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import common, nsr_export
from tests.daemons import Daemon

CAMERAS, WIDTH, HEIGHT, RATE = 8, 640, 360, 25
SECONDS, SETTLE = 8, 10
HARMLESS = "The created element should be floating"  # gst-python 1.22 says so of each in Python

# Runs in the system's Python, which has GStreamer's bindings.
PROGRAM = """
import json, resource, sys, time
import gi
gi.require_version("Gst", "1.0")
from gi.repository import Gst
Gst.init(None)
made, text, seconds = [0], sys.argv[1], float(sys.argv[2])
pipeline = Gst.parse_launch(text)
sinks = [e for e in pipeline.children if e.get_factory().get_name() == "fakesink"]
def count():
    return sum(s.props.stats.get_value("rendered") for s in sinks)
ups = [e for e in pipeline.children if e.get_factory().get_name() == "pvrupscale"]
def plain():
    return sum(e.props.frames_plain for e in ups)
pipeline.set_state(Gst.State.PLAYING)
bus = pipeline.get_bus()
def wait(s):
    message = bus.timed_pop_filtered(int(s * Gst.SECOND), Gst.MessageType.ERROR)
    assert message is None, message.parse_error()
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
if seconds:
    wait(float(sys.argv[3]))
began, first, busy, away = time.monotonic(), count(), cpu(), plain()
if seconds:
    wait(seconds)
else:
    bus.timed_pop_filtered(300 * Gst.SECOND, Gst.MessageType.EOS | Gst.MessageType.ERROR)
frames, took, busy = count() - first, time.monotonic() - began, cpu() - busy
away = plain() - away
pipeline.set_state(Gst.State.NULL)
print(json.dumps({
    "rate": frames / took, "ms": 1e3 * busy / max(frames, 1), "plain": 100.0 * away / max(frames, 1)
}))
"""


def run(between: str, address: str, folder: str, seconds: float, settle: float) -> dict[str, Any]:
    """The pipelines with `between` in the place of the element; one, of a file, for 0 seconds."""
    live = "is-live=true" if seconds else "num-buffers=250"
    camera = (
        f"videotestsrc {live} pattern=ball ! video/x-raw,format=I420,width={WIDTH},"
        f"height={HEIGHT},framerate={RATE}/1 ! queue max-size-buffers=2 ! {between} ! "
        f"fakesink sync={str(bool(seconds)).lower()} qos=true"
    )
    env = {
        **os.environ, "PATH": f"/usr/bin:{os.environ.get('PATH', os.defpath)}",
        "PVRD_BUS": address, "GST_PLUGIN_PATH": str(common.ROOT / "pvrd/hooks/gst"),
        "GST_REGISTRY": f"{folder}/registry.bin",
    }  # fmt: skip
    command = [
        "/usr/bin/python3",
        "-c",
        PROGRAM,
        " ".join([camera] * (CAMERAS if seconds else 1)),
        str(seconds),
        str(settle),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line and HARMLESS not in line]
    if said:
        print("\n".join(said), file=sys.stderr)
    done.check_returncode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(args: argparse.Namespace) -> list[common.Row]:
    """The rows."""
    seconds, settle = (SECONDS / 2, SETTLE / 2) if args.quick else (SECONDS, SETTLE)
    model = nsr_export.shipped("fast")
    config = {"cpu.threads": args.threads, "gpu.enabled": args.device == "gpu"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        daemon = stack.enter_context(Daemon(Path(folder), model.parent, config))
        client = stack.enter_context(daemon.client())
        daemon.ready(client, args.device)
        ours, peer = "pvrupscale model=fast scale=2", f"videoscale ! {_size()}"
        runs = [run(b, daemon.address, folder, seconds, settle) for b in (ours, peer)]
        file = [run(b, daemon.address, folder, 0, 0) for b in ("identity", ours, peer)]
    mine, other = runs
    none, element, scaler = (found["ms"] for found in file)
    name = f"{CAMERAS} cameras {WIDTH}x{HEIGHT}"
    return [
        common.row("element", "ms of CPU a frame", element - none, scaler - none, "videoscale"),
        common.row(name, "frames/s", mine["rate"], other["rate"], "videoscale"),
        common.row(f"{name} process", "ms of CPU a frame", mine["ms"], other["ms"], "videoscale"),
        common.row(f"{name} by networks", "% of frames", 100.0 - mine["plain"], None, ""),
    ]


def _size() -> str:
    return f"video/x-raw,width={2 * WIDTH},height={2 * HEIGHT}"


def options(parser: argparse.ArgumentParser) -> None:
    """Beside those of all benchmarks."""
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").partition("\n")[0], measure, options))
