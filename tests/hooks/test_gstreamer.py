# SPDX-License-Identifier: Apache-2.0
"""The element pvrupscale in GStreamer's own programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, Self

import pytest

from tests.buses import ROOT, until
from tests.daemons import Restartable

pytestmark = pytest.mark.bus

DRIVER = Path(__file__).with_name("gst_driver.py")
PLUGINS = ROOT / "pvrd/hooks/gst"
SIZE = "width=64,height=48,framerate=25/1"
SINK = "fakesink name=sink sync=false"
UP = "pvrupscale name=up device=cpu model=fast"


@pytest.fixture(scope="module")
def gst(pvrd: Restartable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of GStreamer's programs."""
    folder = tmp_path_factory.mktemp("gst")
    # The loader runs the python3 that is first in the PATH; PyGObject is the distribution's.
    path = f"/usr/bin:{os.environ.get('PATH', os.defpath)}"
    return {
        **os.environ, "PATH": path, "PVRD_BUS": pvrd.address, "PYTHONDONTWRITEBYTECODE": "1",
        "GST_PLUGIN_PATH": str(PLUGINS), "GST_REGISTRY": str(folder / "registry.bin"),
    }  # fmt: skip


def drive(gst: dict[str, str], case: str, pipeline: str) -> Any:
    done = subprocess.run(
        ["/usr/bin/python3", str(DRIVER), case, pipeline], env=gst, text=True,
        stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def test_gst_launch(gst: dict[str, str], tmp_path: Path) -> None:
    """The program itself, to a file; downstream asks for a size that is no whole number of times
    larger."""
    command = (
        f"gst-launch-1.0 -q videotestsrc num-buffers=5 ! video/x-raw,format=I420,{SIZE} ! "
        f"pvrupscale device=cpu ! video/x-raw,width=152,height=96 ! y4menc ! "
        "filesink location=out.y4m"
    )
    subprocess.run(command.split(), env=gst, cwd=tmp_path, check=True, timeout=120)
    head, *frames = (tmp_path / "out.y4m").read_bytes().split(b"FRAME\n")
    assert b"W152 H96" in head
    # 64x48 is 4:3; 152x96 is not, so a pixel is no square any more.
    assert b"A16:19" in head
    assert [len(frame) for frame in frames] == [152 * 96 * 3 // 2] * 5


@pytest.mark.parametrize(("form", "scale", "size"), [("I420", 0, "128x96"), ("NV12", 3, "192x144")])
def test_formats_times_and_the_end(gst: dict[str, str], form: str, scale: int, size: str) -> None:
    found = drive(
        gst, "launch",
        f"videotestsrc num-buffers=9 ! video/x-raw,format={form},{SIZE} ! {UP} scale={scale} ! "
        f"{SINK}",
    )  # fmt: skip
    assert (found["end"], found["caps"]) == ("eos", [f"{form} {size}"])
    assert [pts for pts, _ in found["frames"]] == [40 * n for n in range(9)]
    assert found["durations"] == [40]
    assert (found["done"], found["plain"]) == (9, 0)
    # The end comes after the last frame, the caps before the first.
    assert found["events"][-1] == "eos 9"
    assert "caps 0" in found["events"]


def test_a_flushing_seek(gst: dict[str, str]) -> None:
    found = drive(gst, "seek", f"videotestsrc ! video/x-raw,format=I420,{SIZE} ! {UP} ! {SINK}")
    assert found["flushed"][:2] == ["flush-start", "flush-stop"]
    assert found["end"] == "eos"
    assert [pts for pts, _ in found["frames"]][-7:] == [40 * n for n in range(3, 10)]


def test_the_size_changes_on_the_way(gst: dict[str, str]) -> None:
    found = drive(
        gst, "resize",
        "videotestsrc num-buffers=300 ! videoscale ! capsfilter name=size "
        f"caps=video/x-raw,format=NV12,{SIZE} ! {UP} scale=2 ! {SINK}",
    )  # fmt: skip
    assert found["end"] == "eos"
    assert found["caps"] == ["NV12 128x96", "NV12 160x120"]
    assert [pts for pts, _ in found["frames"]] == sorted(pts for pts, _ in found["frames"])
    assert len(found["frames"]) == 300


def test_latency_and_qos(gst: dict[str, str]) -> None:
    found = drive(
        gst, "live",
        f"videotestsrc is-live=true ! video/x-raw,format=I420,{SIZE} ! {UP} ! "
        "fakesink name=sink sync=true",
    )  # fmt: skip
    assert found["live"]
    assert found["own_ms"] == 80
    assert found["told_ms"] >= 80  # by the LATENCY event: deadlines are made of it
    assert found["dropped"] >= 1


def test_a_source_that_is_live_late(gst: dict[str, str]) -> None:
    """Its frames have deadlines all the same."""
    source = f"videotestsrc name=source is-live=true num-buffers=3 ! video/x-raw,format=I420,{SIZE}"
    found = drive(gst, "late", f"{source} ! {UP} ! {SINK}")
    assert (found["end"], found["live"], len(found["frames"])) == ("eos", True, 3)


def test_a_frame_that_is_cut_short_is_left_out_with_a_word(gst: dict[str, str]) -> None:
    source = f"appsrc name=source ! video/x-raw,format=I420,{SIZE}"
    found = drive(gst, "short", f"{source} ! {UP} ! {SINK}")
    assert (found["end"], found["said"]) == ("eos", "a frame is cut short; it is left out")
    assert [ms for ms, _ in found["frames"]] == [0, 80]


@pytest.mark.parametrize("case", ["timeless", "far"])
def test_a_live_source_without_times_has_no_deadlines(gst: dict[str, str], case: str) -> None:
    # A sink that waits for far times would wait; for none it does not.
    sink = "fakesink name=sink sync=true" if case == "timeless" else SINK
    found = drive(gst, case, f"appsrc name=source ! video/x-raw,format=I420,{SIZE} ! {UP} ! {sink}")
    assert (found["end"], len(found["frames"])) == ("eos", 3)


def test_a_pool_without_a_size_is_told_it(gst: dict[str, str]) -> None:
    """pipewiresink crashes when a program takes its node before it knows."""
    source = f"videotestsrc num-buffers=3 ! video/x-raw,format=I420,{SIZE}"
    found = drive(gst, "pool", f"{source} ! {UP} scale=2 ! {SINK}")
    assert (found["end"], len(found["frames"])) == ("eos", 3)
    assert (found["active"], found["size"]) == (True, 128 * 96 * 3 // 2)


def test_refusals_are_sentences(gst: dict[str, str]) -> None:
    source = f"videotestsrc num-buffers=3 ! video/x-raw,format=I420,{SIZE}"
    found = drive(gst, "launch", f"{source} ! {UP} model=nonesuch ! {SINK}")
    assert "nonesuch" in found["end"]
    interlaced = f"{source},interlace-mode=interleaved ! {UP} ! {SINK}"
    assert "interlaced" in drive(gst, "launch", interlaced)["end"]


class Camera:
    """A live pipeline that tells, when it is asked, what it has made."""

    def __init__(self, gst: dict[str, str], sink: str, rate: int = 25) -> None:
        size = SIZE.replace("25/1", f"{rate}/1")
        camera = f"videotestsrc is-live=true ! video/x-raw,format=I420,{size}"
        self.process = subprocess.Popen(
            ["/usr/bin/python3", str(DRIVER), "restart", f"{camera} ! {UP} qos=false ! {sink}"],
            env=gst, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()

    def _told(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self) -> tuple[int, int]:
        """Frames by pvrd, and frames that were scaled plainly."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        told = self._told()
        return told["done"] - told["plain"], told["plain"]

    def end(self) -> list[int]:
        """The times of all frames in ms, each of which has its size."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        frames = self._told()["frames"]
        assert {size for _, size in frames} == {128 * 96 * 3 // 2}
        return [pts for pts, _ in frames]


def test_a_restart_costs_no_frame(pvrd: Restartable, gst: dict[str, str]) -> None:
    with Camera(gst, SINK) as camera:
        try:
            until(lambda: camera.ask()[0] > 5, "frames by pvrd")
            before = camera.ask()[1]
            pvrd.stop(signal.SIGKILL)
            until(lambda: camera.ask()[1] > before + 5, "frames that are scaled plainly")
            pvrd.start()
            made = camera.ask()[0]
            until(lambda: camera.ask()[0] > made + 5, "frames by the new pvrd")
        finally:
            if not pvrd.running:
                pvrd.start()
        times = camera.end()
        assert times == [times[0] + 40 * n for n in range(len(times))]


def test_a_daemon_that_does_not_answer_is_not_waited_for(
    pvrd: Restartable, gst: dict[str, str]
) -> None:
    """Frames with a deadline are scaled plainly when their time comes, and pvrd is heard again."""
    # A frame may take two periods: at 25 a second a machine without a free CPU makes none in time.
    with Camera(gst, "fakesink name=sink sync=true", rate=4) as camera:
        until(lambda: camera.ask()[0] > 2, "frames by pvrd")
        before = camera.ask()[1]
        pvrd.process.send_signal(signal.SIGSTOP)
        try:
            # More than may be under way.
            until(lambda: camera.ask()[1] > before + 6, "frames that are scaled plainly")
        finally:
            pvrd.process.send_signal(signal.SIGCONT)
        made = camera.ask()[0]
        until(lambda: camera.ask()[0] > made + 2, "frames by pvrd again")
