# SPDX-License-Identifier: Apache-2.0
"""Draws input, bicubic, ours and ground truth side by side, with a crop, PSNR and SSIM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, errors, output
from pvrd.ctl.picture import enlarged, sealed_copy, wishes
from pvrd.ctl.target import Target
from pvrd.ctl.upscale import open_input, size_options

if TYPE_CHECKING:
    import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl compare`."""
    common.job_options(parser)
    size_options(parser)
    parser.add_argument(
        "--truth", metavar="HR", help="what IN was made of; its size is that of the result"
    )
    parser.add_argument(
        "--crop", metavar="X,Y", help="the crop's corner (where ours and bicubic differ most)"
    )
    parser.add_argument("input", metavar="IN", help="a PNG or a JPEG; - is standard input")
    parser.add_argument("output", metavar="OUT.png", help="the sheet; - is standard output")


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl compare`.

    Raises:
        CtlError: no picture, no daemon, a refusal, a full disk.
    """
    if args.output == "-":
        output.json_on_stderr()
    if args.truth:
        args.size = _size_of(args.truth)
    source, kind, seen = open_input(args.input)
    try:
        if kind == "y4m":
            raise errors.CtlError("IN is a clip; compare takes a picture.", errors.BAD_INPUT)
        picture = sealed_copy(source, seen)
        try:
            with Target(args.output, source) as target, common.client(args) as client:
                with enlarged(client, picture, wishes(args, "png")) as (end, result):
                    record, sheet = _sheet(args, picture, result)
                target.write([memoryview(sheet)])
                target.finish()
                record["model"] = args.model or common.default_model(client, "video")
                record["device"] = str(end.get("device", ""))
        finally:
            os.close(picture)
    finally:
        if source:
            os.close(source)
    if args.json:
        output.emit_json(record)
    elif args.truth and os.isatty(2) and record["psnr"]["ours"]:
        plain, ours = (record["psnr"][which] for which in ("bicubic", "ours"))
        sys.stderr.write(f"PSNR-Y {ours:.2f} dB, bicubic {plain:.2f} dB\n")
    return errors.OK


def _size_of(name: str) -> tuple[int, int]:
    from PIL import Image

    try:
        with Image.open(name, formats=("PNG", "JPEG")) as picture:
            return picture.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        number = getattr(error, "errno", None)
        what = os.strerror(number) if number else "neither a PNG nor a JPEG picture"
        if isinstance(error, Image.DecompressionBombError):
            what = "the picture is too large"
        raise errors.CtlError(
            f"{output.plain(name)}: {what}.", errors.BAD_INPUT, "InvalidArgument"
        ) from error


def _sheet(args: argparse.Namespace, picture: int, result: int) -> tuple[dict[str, Any], bytes]:
    """What was measured, and the sheet: by a program of its own."""
    options = [f"--truth={args.truth}"] if args.truth else []
    options += [f"--crop={args.crop}"] if args.crop else []
    sheet = os.memfd_create("sheet", os.MFD_CLOEXEC)
    try:
        files = [f"/dev/fd/{fd}" for fd in (picture, result, sheet)]
        command, env = common.engine_program("engine.video.compare", [*options, *files])
        done = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", check=False, pass_fds=(picture, result, sheet),
        )  # fmt: skip
        if done.returncode:
            message = output.plain(done.stderr.strip()) or "The sheet was not drawn."
            code = done.returncode if done.returncode > 0 else errors.FAILED  # a signal ended it
            raise errors.CtlError(message, code, "InvalidArgument")
        with open(os.dup(sheet), "rb") as file:
            file.seek(0)
            return json.loads(done.stdout), file.read()
    finally:
        os.close(sheet)
