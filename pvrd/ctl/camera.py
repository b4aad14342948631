# SPDX-License-Identifier: Apache-2.0
"""Makes an enlarged virtual camera of a camera, until Ctrl-C.

A GStreamer pipeline with the element pvrupscale; where pvrd is away frames are scaled plainly.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pvrd.ctl import common, errors, output
from pvrd.ctl.upscale import size_options

if TYPE_CHECKING:
    import argparse

_NEEDED = {
    "gst-launch-1.0": "gstreamer1.0-tools",
}
_ELEMENTS = {
    "pvrupscale": "gstreamer1.0-python3-plugin-loader python3-gst-1.0 gir1.2-gst-plugins-base-1.0"
    " libpython3-dev",  # Debian 13's loader looks for a link that is in there
    "videoconvert": "gstreamer1.0-plugins-base",
    "progressreport": "gstreamer1.0-plugins-good",
    "v4l2src": "gstreamer1.0-plugins-good",
    "v4l2sink": "gstreamer1.0-plugins-good",
    "pipewiresrc": "gstreamer1.0-pipewire",
    "pipewiresink": "gstreamer1.0-pipewire",
}
_NAME = re.compile(r"[\w.:@/-]{1,128}")
STOP_S = 5.0
_PR_SET_PDEATHSIG = 1
LEAST_S = 2  # that the pipeline may be silent, for it tells each second that frames come
# pipewiresrc 0.3.65 neither ends nor complains when its camera goes, or was never there.
_LOADED = "Setting pipeline to PAUSED"
# pipewiresink 1.4 ends when the program that reads the camera leaves.
_LEFT = "all buffers have been removed"
_NOBODY = "target not found"  # pipewiresrc from 1.0 on
_ALIVE = ["progressreport", "update-freq=1", "do-query=false"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl camera`."""
    common.job_options(parser)
    size_options(parser)
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="v4l2:DEV|pipewire[:NAME]|test",
        help="the camera: a device, a node of PipeWire (the default one), or a test picture",
    )
    parser.add_argument(
        "--to",
        dest="sink",
        required=True,
        metavar="pipewire[:NAME]|v4l2loopback:DEV",
        help="where the new camera shows: a node of PipeWire, or a device of v4l2loopback",
    )
    parser.add_argument(
        "--capture",
        type=_capture,
        metavar="WxH[@FPS]",
        help="what is asked of the camera (what it offers; 640x360@25 of test)",
    )
    parser.add_argument(
        "--timeout",
        type=_patience,
        default=10,
        metavar="S",
        help="end when no frame comes for so many seconds (10; 0: wait for ever)",
    )
    parser.add_argument("--jpeg", action="store_true", help="ask a v4l2 camera for JPEG frames")
    parser.add_argument(
        "--print", action="store_true", dest="show", help="print the pipeline and end"
    )


def _capture(text: str) -> str:
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})(?:@(\d{1,3}))?", text)
    if not found:
        raise ValueError
    rate = f",framerate={found[3]}/1" if found[3] else ""
    return f"width={found[1]},height={found[2]}{rate}"


_capture.__name__ = "size such as 640x360@25"


def _patience(text: str) -> int:
    value = int(text)
    if value and not LEAST_S <= value <= 3600:
        raise ValueError
    return value


_patience.__name__ = "number of seconds, 2 to 3600, or 0"


def _bad(sentence: str, code: int = errors.USAGE) -> errors.CtlError:
    return errors.CtlError(sentence, code, "InvalidArgument")


def _device(text: str, what: str) -> str:
    """The path of a video device.

    Raises:
        CtlError: it is none.
    """
    if not text:
        raise _bad(f"{what} needs a device, as {what}:/dev/video0.")
    hint = " (modprobe v4l2loopback makes one)" if what == "v4l2loopback" else ""
    try:
        mode = os.stat(text).st_mode
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise _bad(f"{output.plain(text)}: {reason}{hint}.", errors.BAD_INPUT) from error
    if not stat.S_ISCHR(mode):
        raise _bad(f"{output.plain(text)} is no video device{hint}.", errors.BAD_INPUT)
    return text


def pipeline(args: argparse.Namespace) -> list[list[str]]:
    """The elements with their properties, as arguments for gst-launch-1.0.

    Raises:
        CtlError: a camera, a target or a name that makes no sense.
    """
    kind, _, source = args.source.partition(":")
    target, _, sink = args.sink.partition(":")
    for name in (source, sink, args.model or ""):
        if name and not _NAME.fullmatch(name):
            raise _bad(f"{output.plain(name)!r} is no name of a device, node or model.")
    capture = args.capture or ("width=640,height=360,framerate=25/1" if kind == "test" else "")
    raw = "image/jpeg" if args.jpeg and kind == "v4l2" else "video/x-raw"
    wanted = [f"{raw},{capture}" if capture else raw]
    if kind == "v4l2":
        begin = [["v4l2src", f"device={_device(source, kind)}"], wanted]
        begin += [["jpegdec"]] if args.jpeg else []
    elif kind == "pipewire":
        # A camera that was named is not to be replaced by another one.
        fixed = "stream-properties=props,node.dont-reconnect=true,node.dont-fallback=true"
        node = [f"target-object={source}", fixed] if source else []
        begin = [["pipewiresrc", *node, "do-timestamp=true"], wanted]
    elif args.source == "test":
        begin = [["videotestsrc", "is-live=true"], wanted]
    else:
        raise _bad(f"--from is v4l2:DEV, pipewire or test, not {output.plain(args.source)}.")
    up = ["pvrupscale"]
    size = [] if args.size else [f"scale={args.scale:g}"]
    up += [*size, *(f"{key}={value}" for key, value in _wishes(args).items())]
    larger = [[f"video/x-raw,width={args.size[0]},height={args.size[1]}"]] if args.size else []
    if target == "pipewire":
        name = sink or "pvrd-camera"
        properties = f"props,media.class=Video/Source,media.role=Camera,node.name={name}"
        described = f"{properties},node.description={name}"
        end = [["pipewiresink", "mode=provide", f"stream-properties={described}"]]
    elif target == "v4l2loopback":
        end = [["videoconvert"], ["v4l2sink", f"device={_device(sink, target)}", "sync=false"]]
    else:
        raise _bad(f"--to is pipewire or v4l2loopback:DEV, not {output.plain(args.sink)}.")
    waiting = ["queue", "max-size-buffers=2", "leaky=downstream"]
    plain = [["videoconvert"], ["video/x-raw,format=I420"]]
    alive = [_ALIVE] if args.timeout else []
    return [*begin, *plain, *alive, waiting, up, *larger, *end]


def _wishes(args: argparse.Namespace) -> dict[str, str]:
    if args.share:
        raise _bad("A camera has deadlines instead of a share; leave --share out.")
    given = {"model": args.model, "device": args.device, "priority": args.priority}
    wishes = {key: str(value) for key, value in given.items() if value is not None}
    bus = args.bus or os.environ.get("PVRD_BUS")
    return {**wishes, "bus": bus} if bus else wishes


def _registry() -> Path:
    """Where GStreamer keeps what it knows of plugins for this command: it never tries one again
    that once failed to load, as Python's does in the PATH of a venv."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pvrd" / "gstreamer.bin"


def environment() -> dict[str, str]:
    """GStreamer's, with our plugin; its loader runs the python3 that is first in the PATH, and
    PyGObject is the distribution's."""
    plugins = str(Path(__file__).resolve().parent.parent / "hooks/gst")
    before = os.environ.get("GST_PLUGIN_PATH")
    return {
        **os.environ,
        "GST_PLUGIN_PATH": f"{plugins}:{before}" if before else plugins,
        "PATH": f"/usr/bin:{os.environ.get('PATH', os.defpath)}",
        "LC_ALL": "C.UTF-8",  # its words are read here
        "LANGUAGE": "",
        "GST_REGISTRY": os.environ.get("GST_REGISTRY") or str(_registry()),
    }


def _check(elements: list[list[str]], env: dict[str, str]) -> None:
    for program, package in _NEEDED.items():
        if shutil.which(program) is None:
            raise errors.CtlError(f"{program} is not installed (Debian: apt install {package}).")
    for element in elements:
        package = _ELEMENTS.get(element[0], "")
        if package and not _is_there(element[0], env):
            # It may have been installed after GStreamer looked for the last time.
            Path(env["GST_REGISTRY"]).unlink(missing_ok=True)
            if not _is_there(element[0], env):
                sentence = f"GStreamer has no {element[0]} here (Debian: apt install {package})."
                raise errors.CtlError(sentence)


def _is_there(element: str, env: dict[str, str]) -> bool:
    command = ["gst-inspect-1.0", element]  # --exists compares versions, too
    nowhere = subprocess.DEVNULL
    return subprocess.run(command, env=env, stdout=nowhere, stderr=nowhere).returncode == 0


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl camera`."""
    elements = pipeline(args)
    words = [word for element in elements for word in (*element, "!")][:-1]
    if args.show:
        sys.stdout.write("gst-launch-1.0 " + " ".join(words) + "\n")
        return errors.OK
    env = environment()
    _check(elements, env)
    while _play(args, words, env):
        pass
    return errors.OK


def _play(args: argparse.Namespace, words: list[str], env: dict[str, str]) -> bool:
    """Runs the pipeline to its end, or Ctrl-C. True: it is to be run again.

    Raises:
        CtlError: it failed.
    """
    process = subprocess.Popen(
        ["gst-launch-1.0", "--no-fault", *words],  # a crash is an end
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for us; the pipeline is ended after it
        preexec_fn=_end_with_parent,
    )
    try:
        said = _follow(process, args.timeout)
        code = process.wait()
    except KeyboardInterrupt:
        _end(process)
        return False
    except TimeoutError:
        source = output.plain(args.source)
        raise errors.CtlError(f"No frame came from {source} for {args.timeout} s.") from None
    finally:
        _end(process)
    if code == 0 and not said:
        return False  # the camera has ended
    reason = next((line for line in said if line.startswith("from element")), "")
    if _LEFT in reason:
        return True
    if reason.endswith(_NOBODY):
        raise errors.CtlError(f"{output.plain(args.source)} is not there.")
    if "PipeWire" in reason and reason.endswith(": Failed to connect"):
        raise errors.CtlError("PipeWire does not answer; is it running for this user?")
    sentence = reason.partition(": ")[2] or (said[0] if said else f"gst-launch-1.0 ended: {code}.")
    raise errors.CtlError(output.sentence(sentence))


def _end_with_parent() -> None:
    # A killed pvrctl leaves no camera behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _follow(process: subprocess.Popen[bytes], patience: int) -> list[str]:
    """What the pipeline complains of, to its end.

    Raises:
        TimeoutError: it did not tell for so many seconds that frames come; that it is being loaded
        does not count.
    """
    assert process.stdout is not None
    fd = process.stdout.fileno()
    said: list[str] = []
    rest, heard = b"", 0.0
    while True:
        left = max(heard + patience - time.monotonic(), 0.0) if patience and heard else None
        if not select.select([fd], [], [], left)[0]:
            raise TimeoutError
        piece = os.read(fd, 65536)
        if not piece:
            return said
        *lines, rest = (rest + piece).split(b"\n")
        for line in (each.decode(errors="replace") for each in lines):
            if line.startswith((_ALIVE[0], _LOADED)):
                heard = time.monotonic()
            for mark in ("ERROR: ", "WARNING: erroneous pipeline: "):
                if line.startswith(mark):
                    said.append(line.removeprefix(mark).strip())


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()
