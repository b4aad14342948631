# SPDX-License-Identifier: Apache-2.0
"""pvrctl camera beside a headless PipeWire. There is no v4l2loopback here: its arguments alone."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from pvrd.client import Client
from pvrd.ctl import camera
from tests.buses import ROOT, WAIT_S, end, until
from tests.daemons import Restartable
from tests.hooks.conftest import Shell

pytestmark = pytest.mark.bus


WIDTH, HEIGHT, PERIOD = 64, 48, 4
SOURCE = f"videotestsrc pattern=zone-plate kx2=80 ky2=60 horizontal-speed={WIDTH // PERIOD}"
RAW = f"video/x-raw,format=I420,width={WIDTH},height={HEIGHT},framerate=5/1"
MOST_OFF = 20.0  # a sample's mean distance between a frame by interpolation and by the network


@pytest.fixture(scope="module")
def pipewire(pvrd: Restartable) -> Iterator[dict[str, str]]:
    """PipeWire and a session manager in a folder of their own; what their programs need to know."""
    # A socket's path may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="pvrd-pw-"))
    own = {"XDG_RUNTIME_DIR": str(folder), "DBUS_SESSION_BUS_ADDRESS": pvrd.address}
    own |= {f"XDG_{name}_HOME": str(folder / name) for name in ("CONFIG", "STATE", "CACHE")}
    own["GST_REGISTRY"] = f"{folder}/registry.bin"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        log = stack.enter_context((folder / "log").open("wb"))
        for program in ("pipewire", "wireplumber"):
            process = subprocess.Popen([program], env={**os.environ, **own}, stdout=log, stderr=log)
            stack.callback(end, process)
            if program == "pipewire":
                until((folder / "pipewire-0").exists, "PipeWire's socket")
        yield own


class Stage:
    """Programs beside PipeWire; those that still run at the end are ended."""

    def __init__(self, env: dict[str, str], folder: Path, stack: ExitStack) -> None:
        self.env, self._folder, self._stack = env, folder, stack
        # GStreamer's own programs, whichever comes first and looks at all plugins: their loader
        # runs the python3 that is first in the PATH; PyGObject is the distribution's.
        self._gst = {**env, "PATH": f"/usr/bin:{env['PATH']}"}

    def run(self, command: str, **options: Any) -> subprocess.Popen[bytes]:
        """A program; what it complains of goes to the file `log`."""
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                shlex.split(command), cwd=self._folder, stderr=log,
                env=self._gst if command.startswith("gst-") else self.env, **options,
            )
        self._stack.callback(end, process)
        return process

    def log(self) -> str:
        return (self._folder / "log").read_text()

    def has(self, node: str) -> bool:
        told = subprocess.run(["pw-dump"], env=self.env, capture_output=True, text=True).stdout
        return f'"{node}"' in told

    def appears(self, node: str, process: subprocess.Popen[bytes]) -> None:
        until(lambda: process.poll() is not None or self.has(node), node)
        assert process.poll() is None, self.log()

    def fake_camera(self) -> subprocess.Popen[bytes]:
        """The node `fake`, which shows the frames of SOURCE over and over."""
        process = self.run(
            f"gst-launch-1.0 -q {SOURCE} is-live=true ! {RAW} ! pipewiresink mode=provide "
            "stream-properties=props,media.class=Video/Source,media.role=Camera,node.name=fake"
        )
        self.appears("fake", process)
        return process

    def frames(self) -> list[bytes]:
        """Those frames: the picture has moved by its width after PERIOD of them."""
        command = f"gst-launch-1.0 -q {SOURCE} num-buffers={PERIOD} ! {RAW} ! fdsink"
        out = subprocess.run(command.split(), env=self._gst, stdout=subprocess.PIPE, check=True)
        size = WIDTH * HEIGHT * 3 // 2
        return [out.stdout[at : at + size] for at in range(0, len(out.stdout), size)]


@pytest.fixture
def stage(pipewire: dict[str, str], environment: dict[str, str], tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage({**environment, **pipewire}, tmp_path, stack)


CAMERA = "pvrctl camera --device cpu --model fast --to pipewire:pvrd-one"


def test_a_camera_appears_and_goes(stage: Stage) -> None:
    """PipeWire lists the enlarged camera while the command runs, and Ctrl-C takes it away; so does
    the command's sudden end."""
    for number, code in ((signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)):
        process = stage.run(f"{CAMERA} --from test --capture 64x48@25")
        stage.appears("pvrd-one", process)
        assert stage.has("Video/Source")
        process.send_signal(number)
        assert process.wait(30) == code
        until(lambda: not stage.has("pvrd-one"), "the camera's end")
    assert not stage.log()


def planes_of(frame: bytes) -> list[Any]:
    flat, half = np.frombuffer(frame, np.uint8), (HEIGHT // 2, WIDTH // 2)
    luma, one = WIDTH * HEIGHT, half[0] * half[1]
    return [
        flat[:luma].reshape(HEIGHT, WIDTH),
        flat[luma : luma + one].reshape(half),
        flat[luma + one :].reshape(half),
    ]


def enlarged(address: str, frames: list[bytes]) -> list[bytes]:
    """What pvrd makes of the frames, asked directly."""
    wishes = {"width": WIDTH, "height": HEIGHT, "scale": 2, "model": "fast", "device": "cpu"}
    with Client(address) as client, client.open_video({**wishes, "siting": "centre"}) as video:
        shown = video.enlarge(planes_of(frame) for frame in frames)
        return [b"".join(plane.tobytes() for plane in planes) for _, planes in shown]


def test_a_program_reads_the_camera(stage: Stage, pvrd: Restartable) -> None:
    """The way of a frame through PipeWire, pvrd and PipeWire: a program that reads the new camera
    gets what pvrd makes of the known source's frames, to the bit."""
    wanted = enlarged(pvrd.address, stage.frames())
    assert len(set(wanted)) == PERIOD
    stage.fake_camera()
    stage.appears("pvrd-one", stage.run(f"{CAMERA} --from pipewire:fake"))
    reader = stage.run(
        "gst-launch-1.0 -q pipewiresrc target-object=pvrd-one ! "
        f"video/x-raw,format=I420,width={2 * WIDTH},height={2 * HEIGHT} ! fdsink",
        stdout=subprocess.PIPE,
    )
    assert reader.stdout is not None
    missing = set(range(len(wanted)))
    with reader.stdout:
        # On a busy machine a frame may have been late: it is close to one, but not the same.
        for _ in range(300):
            got = read(reader.stdout, len(wanted[0]))
            assert got, stage.log()
            off = [float(np.abs(as_ints(got) - as_ints(each)).mean()) for each in wanted]
            assert min(off) < MOST_OFF
            missing -= {index for index, each in enumerate(off) if each == 0}
            if not missing:
                return
    pytest.fail(f"frames {sorted(missing)} were never seen as pvrd makes them")


def test_the_camera_stays_when_its_reader_leaves(stage: Stage) -> None:
    """Under PipeWire 1.4 it comes back: the sink ends with its reader."""
    camera = stage.run(f"{CAMERA} --from test --capture 64x48@25")
    stage.appears("pvrd-one", camera)

    def reads() -> bool:
        reader = stage.run(
            "gst-launch-1.0 -q pipewiresrc target-object=pvrd-one ! "
            f"video/x-raw,format=I420,width={2 * WIDTH},height={2 * HEIGHT} ! fdsink",
            stdout=subprocess.PIPE,
        )
        assert reader.stdout is not None
        with reader.stdout:
            found = bool(select.select([reader.stdout], [], [], 10)[0])
            found = found and bool(os.read(reader.stdout.fileno(), 4096))
            end(reader)
        return found

    for n in range(3):
        until(reads, f"frame {n} of the camera")
    assert camera.poll() is None


def read(pipe: IO[bytes], size: int) -> bytes:
    """So many bytes; none when they do not come."""
    got = b""
    while len(got) < size:
        if not select.select([pipe], [], [], WAIT_S)[0]:
            return b""
        got += os.read(pipe.fileno(), size - len(got))
    return got


def as_ints(frame: bytes) -> Any:
    return np.frombuffer(frame, np.uint8).astype(np.int16)


def test_a_camera_that_goes_or_is_not_there(stage: Stage) -> None:
    """A sentence, and an end: PipeWire 0.3 says nothing, so nothing comes; 1.4 says why."""
    fake = stage.fake_camera()
    gone = stage.run(f"{CAMERA} --from pipewire:fake --timeout 8")
    never = stage.run(f"{CAMERA} --from pipewire:nonesuch --timeout 2")
    stage.appears("pvrd-one", gone)
    end(fake)
    assert [process.wait(60) for process in (gone, never)] == [1, 1]
    said = stage.log()
    for name, patience in (("fake", 8), ("nonesuch", 2)):
        silent = f"pvrctl: No frame came from pipewire:{name} for {patience} s.\n"
        assert silent in said or f"pvrctl: pipewire:{name} is not there.\n" in said
    assert said.count("\n") == 2
    until(lambda: not stage.has("pvrd-one"), "the camera's end")


REFUSALS = [
    ("--from v4l2:/dev/nonesuch --to pipewire", 5, "/dev/nonesuch: No such file or directory."),
    ("--from v4l2 --to pipewire", 2, "v4l2 needs a device, as v4l2:/dev/video0."),
    ("--from v4l2:in --to pipewire", 5, "in is no video device."),
    ("--from film --to pipewire", 2, "--from is v4l2:DEV, pipewire or test, not film."),
    ("--from test --to disk", 2, "--to is pipewire or v4l2loopback:DEV, not disk."),
    ("--from test --to 'pipewire:a\"b'", 2, "'a\"b' is no name of a device, node or model."),
    (
        "--from test --to v4l2loopback:/dev/video77",
        5,
        "/dev/video77: No such file or directory (modprobe v4l2loopback makes one).",
    ),
]


@pytest.mark.parametrize(("options", "code", "sentence"), REFUSALS)
def test_refusals(shell: Shell, tmp_path: Path, options: str, code: int, sentence: str) -> None:
    (tmp_path / "in").touch()
    assert shell(f"pvrctl camera {options}", code).stderr == f"pvrctl: {sentence}\n"


def test_what_is_no_v4l2_device_is_a_sentence(shell: Shell) -> None:
    said = shell("pvrctl camera --from test --to v4l2loopback:/dev/null", 1).stderr
    assert said.count("\n") == 1
    assert "/dev/null" in said


def test_the_pipeline(shell: Shell) -> None:
    """What is run for devices that are not here; any character device does for --print."""
    out = shell(
        "pvrctl camera --from v4l2:/dev/null --jpeg --capture 640x360@30 --print "
        "--to v4l2loopback:/dev/zero --scale 3 --priority 7"
    ).stdout
    assert out.startswith(
        "gst-launch-1.0 v4l2src device=/dev/null ! "
        "image/jpeg,width=640,height=360,framerate=30/1 ! jpegdec ! videoconvert ! "
        "video/x-raw,format=I420 ! progressreport update-freq=1 do-query=false ! "
        "queue max-size-buffers=2 leaky=downstream ! pvrupscale scale=3 priority=7 bus="
    )
    assert out.endswith(" ! videoconvert ! v4l2sink device=/dev/zero sync=false\n")


def test_gst_launch_speaks_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de")
    env = camera.environment()
    assert (env["LC_ALL"], env["LANGUAGE"]) == ("C.UTF-8", "")


def test_without_pipewire(shell: Shell) -> None:
    said = shell("XDG_RUNTIME_DIR=$PWD pvrctl camera --from test --to pipewire", 1).stderr
    assert said == "pvrctl: PipeWire does not answer; is it running for this user?\n"


def test_a_plugin_that_failed_to_load_once(shell: Shell) -> None:
    """GStreamer remembers that Python's loader failed."""
    look = f"GST_REGISTRY=$PWD/reg GST_PLUGIN_PATH={ROOT}/pvrd/hooks/gst gst-inspect-1.0 pvrupscale"
    shell(f"PYTHONHOME=/nowhere {look}", 255)
    shell(f"PATH=/usr/bin:$PATH {look}", 255)
    said = shell("GST_REGISTRY=$PWD/reg pvrctl camera --from v4l2:/dev/null --to pipewire", 1)
    assert "no pvrupscale" not in said.stderr
