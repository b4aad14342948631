# SPDX-License-Identifier: Apache-2.0
"""pvrctl camera beside a headless PipeWire. There is no v4l2loopback here: its arguments alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.buses import end, until
from tests.daemons import Restartable
from tests.hooks.conftest import Shell

pytestmark = pytest.mark.bus


@pytest.fixture(scope="module")
def pipewire(pvrd: Restartable) -> Iterator[dict[str, str]]:
    """PipeWire and a session manager in a folder of their own; their environment."""
    # A socket's path may have 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="pvrd-pw-"))
    env = {
        **os.environ, "XDG_RUNTIME_DIR": str(folder), "DBUS_SESSION_BUS_ADDRESS": pvrd.address,
        "PATH": f"/usr/bin:{os.environ['PATH']}", "GST_REGISTRY": f"{folder}/registry.bin",
    }  # fmt: skip
    env |= {f"XDG_{name}_HOME": str(folder / name) for name in ("CONFIG", "STATE", "CACHE")}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        log = stack.enter_context((folder / "log").open("wb"))
        for program in ("pipewire", "wireplumber"):
            process = subprocess.Popen([program], env=env, stdout=log, stderr=log)
            stack.callback(end, process)
            if program == "pipewire":
                until((folder / "pipewire-0").exists, "PipeWire's socket")
        yield env


def nodes(env: dict[str, str]) -> str:
    return subprocess.run(["pw-dump"], env=env, capture_output=True, text=True).stdout


def test_a_camera_appears_and_goes(
    pipewire: dict[str, str], environment: dict[str, str], tmp_path: Path
) -> None:
    """PipeWire lists the enlarged camera while the command runs, and Ctrl-C takes it away."""
    env = {**environment, **{k: pipewire[k] for k in pipewire if k not in ("PATH", "PVRD_BUS")}}
    env["PVRD_BUS"] = environment["PVRD_BUS"]
    command = ["pvrctl", "camera", "--from", "test", "--capture", "64x48@25", "--device", "cpu"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--to", "pipewire:pvrd-one"], env=env, stderr=log)
        try:
            until(lambda: process.poll() is not None or '"pvrd-one"' in nodes(env), "the camera")
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert '"Video/Source"' in nodes(env)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            end(process)
    assert not (tmp_path / "log").read_text()
    until(lambda: '"pvrd-one"' not in nodes(env), "the camera's end")


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
        "video/x-raw,format=I420 ! "
        "queue max-size-buffers=2 leaky=downstream ! pvrupscale scale=3 priority=7 bus="
    )
    assert out.endswith(" ! videoconvert ! v4l2sink device=/dev/zero sync=false\n")
