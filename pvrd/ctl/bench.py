# SPDX-License-Identifier: Apache-2.0
"""Times the kernels on a device and says what bounds each, or how fast the daemon writes text."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from pvrd.ctl import bench_text, common, errors, output

if TYPE_CHECKING:
    import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl bench`."""
    actions = common.actions(
        parser,
        kernels="time, rates and what bounds each compute kernel",
        text="tokens a second of the daemon, in a table as llama-bench prints",
    )
    kernels = actions["kernels"]
    kernels.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="what to time")
    kernels.add_argument(
        "--allow-software", action="store_true", help="also a Vulkan device that is a CPU"
    )
    kernels.add_argument("--op", metavar="OPERATION", help="this operation alone")
    kernels.add_argument("--quick", action="store_true", help="fewer shapes, less exact")
    bench_text.arguments(actions["text"])
    parser.set_defaults(action=None)


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl bench kernels`, in which no daemon takes part, or `pvrctl bench text`.

    Raises:
        CtlError: there is no such device or operation, or the device failed.
    """
    if args.action == "text":
        return bench_text.run(args)
    if args.action != "kernels":
        sentence = "What is to be done? `pvrctl bench kernels` or `pvrctl bench text`."
        raise errors.CtlError(sentence, errors.USAGE)
    command = ["kernels", f"--device={args.device}"]
    command += [f"--op={args.op}"] if args.op else []
    for given in ("allow_software", "quick", "json"):
        command += [f"--{given.replace('_', '-')}"] if getattr(args, given) else []
    command, env = common.engine_program("engine.bench", command)
    # Lines come as they are measured.
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            for line in child.stdout:
                sys.stdout.write(output.plain(line))
                sys.stdout.flush()
            said = child.stderr.read()
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        message = output.plain(said.strip()) or f"The measurement ended ({child.returncode})."
        message = message.rpartition("engine.bench: error: ")[2]
        raise errors.CtlError(
            message, errors.USAGE if child.returncode == errors.USAGE else errors.FAILED
        )
    return 0
