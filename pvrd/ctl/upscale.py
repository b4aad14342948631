# SPDX-License-Identifier: Apache-2.0
"""Enlarges a y4m or raw clip, or a PNG or JPEG picture.

IN and OUT may be - for standard input and output, so that it sits in a pipe between two ffmpeg
(docs/hooks.md has recipes).
With OUT on standard output --json prints its object on standard error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from pvrd.ctl import common, errors, output
from pvrd.ctl.realtime import rate, words
from pvrd.ctl.target import Target

if TYPE_CHECKING:
    import argparse

    from pvrd.rawvideo import RawHeader

_SUFFIXES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".y4m": "y4m"}
_FOREIGN = (
    ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".jxl",
    ".mp4", ".m4v", ".mkv", ".webm", ".mov", ".avi", ".ts",
)  # fmt: skip
_KINDS = {b"YUV4": "y4m", b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl upscale`."""
    common.job_options(parser)
    size_options(parser)
    parser.add_argument(
        "--tile",
        type=common.at_least(0),
        default=common.from_environment("PVRD_TILE"),
        metavar="PX",
        help="side of a tile; 0: pvrd decides ($PVRD_TILE)",
    )
    parser.add_argument(
        "--overlap",
        type=common.at_least(0),
        default=common.from_environment("PVRD_OVERLAP"),
        metavar="PX",
        help="overlap of tiles; 0: pvrd decides ($PVRD_OVERLAP)",
    )
    parser.add_argument(
        "--unchanged",
        choices=("exact", "tolerant", "off"),
        help="which tiles of a clip keep the last frame's result: those whose input is the same to "
        "the bit (exact), but for noise (tolerant), none (off)",
    )
    parser.add_argument(
        "--precision",
        choices=("model", "f32", "int8", "auto"),
        help="of the network on a CPU: as the model is made for (model: int8 of the fast tier"
        " where the CPU has instructions for it), f32 (the default), int8 (at most 0.1 dB lost),"
        " or the faster one of these (auto)",
    )
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="a clip's frames at its own pace, each with a deadline: where the network is too slow,"
        " smaller ones, the CPU or plain interpolation make them in time",
    )
    parser.add_argument(
        "--fps",
        type=rate,
        metavar="N",
        help="with --realtime: frames a second, of raw video, or instead of what the clip says",
    )
    parser.add_argument(
        "--debug-tiles",
        metavar="OUT.png",
        help="draws who made each tile (of a clip: of its last frame): the GPU green, the CPU blue,"
        " the frame before grey, plain interpolation red",
    )
    parser.add_argument(
        "--format",
        choices=("y4m", "png", "jpeg"),
        help="of the output (as the input, or as OUT is named)",
    )
    parser.add_argument(
        "--raw",
        type=_raw,
        metavar="WxH[:FORMAT]",
        help="IN is raw video of this size and format, by ffmpeg's name (yuv420p, nv12, yuv444p,"
        " gray, yuv420p10le, p010le, …), and so is OUT",
    )
    parser.add_argument(
        "input", metavar="IN", help="a y4m clip, a PNG or a JPEG; - is standard input"
    )
    parser.add_argument("output", metavar="OUT", help="the enlarged one; - is standard output")


def size_options(parser: argparse.ArgumentParser) -> None:
    """How large the result is to be."""
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--scale", type=_scale, default=2.0, metavar="N", help="how many times larger, 1 to 8 (2)"
    )
    sizes.add_argument(
        "--size", type=_size, metavar="WxH", help="the size itself, each side up to 8 times as long"
    )


def _scale(text: str) -> float:
    value = float(text)
    if not 1 <= value <= 8:
        raise ValueError
    return value


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.lower().partition("x")
    if int(width) < 1 or int(height) < 1:
        raise ValueError
    return int(width), int(height)


def _raw(text: str) -> RawHeader:
    from pvrd.rawvideo import parse

    return parse(text)


_raw.__name__ = "raw video such as 1280x720:yuv420p"
_scale.__name__ = "number from 1 to 8"
_size.__name__ = "size such as 1280x720"


def sniff(fd: int) -> tuple[str, bytes]:
    """The kind of the input (y4m, png, jpeg) and the bytes that were read to see it.

    Raises:
        CtlError: it is empty, or none of these.
    """
    seen = b""
    while len(seen) < 4 and not (kind := _KINDS.get(seen)):
        piece = os.read(fd, 1)
        if not piece:
            break
        seen += piece
    kind = _KINDS.get(seen)
    if kind:
        return kind, seen
    if not seen:
        raise errors.CtlError("The input is empty.", errors.BAD_INPUT, "InvalidArgument")
    raise errors.CtlError(
        "The input is neither a y4m clip nor a PNG or JPEG picture.",
        errors.BAD_INPUT,
        "InvalidArgument",
    )


def open_input(name: str, raw: bool = False) -> tuple[int, str, bytes]:
    """The input, its kind, and the bytes that were read to see that; of raw video none are.

    Raises:
        CtlError: it cannot be read, or is none that pvrctl takes.
    """
    source = 0
    try:
        if name != "-":
            source = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        return (source, "raw", b"") if raw else (source, *sniff(source))
    except OSError as error:
        sentence = f"{output.plain(name)}: {os.strerror(error.errno or 0)}."
        failure = errors.CtlError(sentence, errors.BAD_INPUT, "InvalidArgument")
        failure.__cause__ = error
    except errors.CtlError as error:
        failure = error
    if source:
        os.close(source)
    raise failure


def out_format(given: str | None, name: str, kind: str) -> str:
    """The format of the output: as asked, else as OUT's name says, else as the input.

    Raises:
        CtlError: a clip was to become a picture, or the other way round, or OUT is named after a
        format that is not written.
    """
    suffix = os.path.splitext(name)[1].lower()
    if not given and suffix in _FOREIGN:
        raise errors.CtlError(
            f"pvrctl writes y4m, PNG and JPEG, not {suffix[1:]}: name OUT so, or say --format.",
            errors.USAGE,
            "InvalidArgument",
        )
    wanted = given or _SUFFIXES.get(suffix) or kind
    if wanted != kind and {wanted, kind} & {"y4m", "raw"}:
        raise errors.CtlError(
            f"A {kind} input cannot become {wanted}.", errors.USAGE, "InvalidArgument"
        )
    return wanted


def _tile_target(
    args: argparse.Namespace, source: int, stack: contextlib.ExitStack
) -> Target | None:
    """Where --debug-tiles goes.

    Raises:
        CtlError: it cannot be written, or is IN or OUT.
    """
    name = args.debug_tiles
    if not name:
        return None
    if name == args.output or os.path.realpath(name) == os.path.realpath(args.output):
        raise errors.CtlError("--debug-tiles names OUT.", errors.USAGE, "InvalidArgument")
    return stack.enter_context(Target(name, source))


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl upscale`."""
    if args.output == "-":
        output.json_on_stderr()
        if os.isatty(1):
            raise errors.CtlError(
                "The enlarged data would go to the terminal; name a file.", errors.USAGE
            )
    if not args.input or not args.output:
        raise errors.CtlError("IN and OUT have to be named.", errors.USAGE, "InvalidArgument")
    if args.fps and not args.realtime:
        raise errors.CtlError("--fps goes with --realtime.", errors.USAGE, "InvalidArgument")
    source, kind, seen = open_input(args.input, args.raw is not None)
    try:
        if args.realtime and kind not in ("y4m", "raw"):
            raise errors.CtlError(
                "--realtime is for clips, not for pictures.", errors.USAGE, "InvalidArgument"
            )
        wanted = out_format(args.format, args.output, kind)
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(Target(args.output, source))
            # Opened now: a name that cannot be written is told before the work, not after it.
            tiles = _tile_target(args, source, stack)
            if kind in ("y4m", "raw"):
                from pvrd.ctl.clip import enlarge_clip

                record = enlarge_clip(args, source, seen, target)
            else:
                from pvrd.ctl.picture import enlarge_picture

                record = enlarge_picture(args, source, seen, wanted, target)
            target.finish()
            if tiles is not None:
                from pvrd.ctl.tile_picture import draw

                picture = draw(record.pop("tile_map"), record["width"], record["height"])
                tiles.write([memoryview(picture)])
                tiles.finish()
    finally:
        if source:
            os.close(source)
    if args.json:
        output.emit_json(record)
    elif os.isatty(2):
        slow = (
            f", {record['tiles_fallback']} of {record['tiles']} tiles interpolated plainly"
            if record["tiles_fallback"]
            else ""
        )
        sys.stderr.write(
            f"{record['frames']} frame{'s' if record['frames'] != 1 else ''} of {record['width']}x"
            f"{record['height']}, {output.rate(record['fps'])} frames/s on {record['device']} "
            f"({output.plain(record['device_name'])}){slow}{words(record)}\n"
        )
    return errors.OK
