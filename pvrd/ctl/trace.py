# SPDX-License-Identifier: Apache-2.0
"""Records slices, submissions and jobs for some seconds, as a file for Perfetto or Chrome."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from pvrd.ctl import common, errors, output
from pvrd.ctl.picture import copy
from pvrd.ctl.target import Target

if TYPE_CHECKING:
    import argparse

MOST_S = 600.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl trace`."""
    parser.add_argument(
        "--seconds", type=seconds, default=2.0, metavar="N", help="how long to record (2)"
    )
    parser.add_argument("out", metavar="OUT", help="the file (JSON), - for standard output")


def seconds(text: str) -> float:
    """A time that a trace may take."""
    value = float(text)
    if not 0.01 <= value <= MOST_S:
        raise ValueError
    return value


seconds.__name__ = f"number of seconds from 0.01 to {MOST_S:g}"


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl trace`."""
    if args.out == "-" and args.json:
        output.json_on_stderr()
    # Opened first: a name that cannot be written is told before the time is spent.
    with Target(args.out) as target:
        with common.client(args) as client:
            fd = client.trace(args.seconds)
        try:
            size = os.fstat(fd).st_size
            copy(fd, target)
        finally:
            os.close(fd)
        target.finish()
    if args.json:
        output.emit_json({"out": args.out, "bytes": size, "seconds": args.seconds})
    elif args.out != "-":
        name = output.plain(args.out)
        sys.stdout.write(f"{name}: {output.size(size)}; open it in ui.perfetto.dev.\n")
    return errors.OK
