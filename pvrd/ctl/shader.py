# SPDX-License-Identifier: Apache-2.0
"""Says whether a compute shader would run on a device, and why not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pvrd.ctl import common, errors, output

if TYPE_CHECKING:
    import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl shader`."""
    actions = common.actions(parser, check="hold a GLSL compute shader against a device's profile")
    check = actions["check"]
    check.add_argument("file", metavar="FILE.comp")
    check.add_argument(
        "--profile", metavar="NAME", help="the device: axe-1-16m, bxm-4-64, bxs-4-64, old, phone"
    )
    check.add_argument(
        "-D", dest="defines", action="append", default=[], metavar="NAME[=VALUE]", help="a macro"
    )
    check.add_argument(
        "-I", dest="folders", action="append", default=[], metavar="FOLDER", help="of includes"
    )
    parser.set_defaults(action=None)


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl shader check`; no daemon takes part.

    Raises:
        CtlError: the shader does not compile, there is no compiler or no such profile.
    """
    if args.action != "check":
        raise errors.CtlError("What is to be done? `pvrctl shader check FILE`.", errors.USAGE)
    command = [*(f"-D{d}" for d in args.defines), *(f"-I{f}" for f in args.folders)]
    if args.profile:
        command.append(f"--profile={args.profile}")
    if args.json:
        command.append("--json")
    done = common.run_engine("engine.shader", [*command, "--", args.file])
    if done.returncode and not done.stdout:
        message = output.plain(done.stderr.strip()) or "The check ended without a word."
        # An unknown profile: argparse's usage comes before its sentence.
        message = message.rpartition("engine.shader: error: ")[2]
        code = done.returncode if done.returncode in (errors.USAGE, errors.BAD_INPUT) else 1
        name = "InvalidArgument" if code == errors.BAD_INPUT else ""
        raise errors.CtlError(message, code, name)
    sys.stdout.write(output.plain(done.stdout))
    return done.returncode
