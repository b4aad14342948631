# SPDX-License-Identifier: Apache-2.0
"""Writes a video model's network in a form that other programs run: a user shader of mpv."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, errors, output

if TYPE_CHECKING:
    import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl export`."""
    parser.add_argument(
        "--mpv",
        action="store_true",
        required=True,
        help="as a user shader for luma, of mpv and all that uses libplacebo",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a .pvrm file, or one that comes with pvrd (fast, balanced, quality, fast-x3 …)",
    )
    parser.add_argument("output", metavar="OUT.glsl")


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl export`; no daemon takes part.

    Raises:
        CtlError: the model is none, or not of the nsr family, or the shader cannot be written.
    """
    done = common.run_engine("engine.export_mpv", ["--json", "--", args.model, args.output])
    try:
        record: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().rpartition("\n")[2]
        sentence = output.plain(said) or "The exporter ended without a word."
        raise errors.CtlError(sentence, errors.FAILED) from None
    if "error" in record:
        name = str(record["error"])
        raise errors.CtlError(output.plain(str(record["message"])), errors.code_of(name), name)
    if args.json:
        output.emit_json(record)
    else:
        sys.stdout.write(output.plain(str(record["text"])) + "\n")
    return errors.OK
