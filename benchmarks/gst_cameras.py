# SPDX-License-Identifier: Apache-2.0
"""Eight live cameras of 640x360 at 25 frames/s through `pvrupscale` in one GStreamer process.

Rows: the processor time that the element itself takes for a frame (a file of one camera, as fast as
it goes; the process's time without what the same pipeline takes with `identity`), against
GStreamer's own `videoscale`; frames a second that reach the sinks of eight live cameras, of 200,
against `videoscale` in the same pipelines; of pvrd's frames, how many its networks made. With a CPU
as pvrd's device the daemon's work competes with the process for the cores.
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

CAMERAS, WIDTH, HEIGHT, RATE, SECONDS = 8, 640, 360, 25, 8

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
    wait(3)
began, first, busy, away = time.monotonic(), count(), cpu(), plain()
if seconds:
    wait(seconds)
else:
    bus.timed_pop_filtered(300 * Gst.SECOND, Gst.MessageType.EOS | Gst.MessageType.ERROR)
frames, took, busy = count() - first, time.monotonic() - began, cpu() - busy
away = plain() - away
pipeline.set_state(Gst.State.NULL)
print(json.dumps({"rate": frames / took, "ms": 1e3 * busy / max(frames, 1), "plain": away}))
"""


def run(between: str, address: str, folder: str, seconds: float) -> dict[str, Any]:
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
    ]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(args: argparse.Namespace) -> list[common.Row]:
    """The rows."""
    seconds = SECONDS / 2 if args.quick else SECONDS
    model = nsr_export.shipped("fast")
    config = {"cpu.threads": args.threads, "gpu.enabled": args.device == "gpu"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        daemon = stack.enter_context(Daemon(Path(folder), model.parent, config))
        client = stack.enter_context(daemon.client())
        daemon.ready(client, args.device)
        ours, peer = "pvrupscale model=fast scale=2", f"videoscale ! {_size()}"
        runs = [run(b, daemon.address, folder, seconds) for b in (ours, peer)]
        file = [run(b, daemon.address, folder, 0) for b in ("identity", ours, peer)]
        frames = client.statistics()["frames"]
    mine, other = runs
    none, element, scaler = (found["ms"] for found in file)
    name = f"{CAMERAS} cameras {WIDTH}x{HEIGHT}"
    whole = int(frames["done"]) or 1
    network = 100.0 * (whole - int(frames["degraded"])) / whole
    return [
        common.row("element", "ms of CPU a frame", element - none, scaler - none, "videoscale"),
        common.row(name, "frames/s", mine["rate"], other["rate"], "videoscale"),
        common.row(f"{name} process", "ms of CPU a frame", mine["ms"], other["ms"], "videoscale"),
        common.row(f"{name} by networks", "% of pvrd's", network, None, ""),
        common.row(f"{name} plain", "frames", float(mine["plain"]), None, ""),
    ]


def _size() -> str:
    return f"video/x-raw,width={2 * WIDTH},height={2 * HEIGHT}"


def options(parser: argparse.ArgumentParser) -> None:
    """Beside those of all benchmarks."""
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").partition("\n")[0], measure, options))
