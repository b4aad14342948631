# SPDX-License-Identifier: Apache-2.0
"""The entry of pvrctl: finds the command, imports that one alone, and turns every end into an exit
code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from pvrd import __version__
from pvrd.ctl import common, errors

if TYPE_CHECKING:
    import argparse
    from types import FrameType

COMMANDS = {
    "status": "what the daemon does and on which device",
    "devices": "the devices that do the work",
    "models": "list, add and remove models",
    "generate": "answer one prompt",
    "chat": "talk, turn by turn",
    "extract": "what a text says, as JSON that fits a schema",
    "classify": "which of some labels fits a text",
    "embed": "vectors for texts, to compare them by",
    "compile": "make a model of a language model or of a network for pictures",
    "export": "write a network as a shader that mpv runs",
    "upscale": "enlarge a y4m clip or a PNG or JPEG picture",
    "camera": "an enlarged virtual camera",
    "compare": "show what enlarging does to a picture, beside bicubic and the truth",
    "jobs": "your sessions and jobs, and where they stand",
    "top": "devices, processes and jobs, live",
    "trace": "record slices and jobs as a file for Perfetto",
    "hold": "keep the GPU free while a command runs",
    "config": "show or change the configuration",
    "stats": "counters of the daemon and its devices",
    "shader": "whether a compute shader would run on a device, and why not",
    "bench": "how fast each compute kernel is, or the daemon with text",
    "doctor": "what is accelerated, what is not, why, and how to mend it",
}


_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


def parser_for(command: str) -> argparse.ArgumentParser:
    """The parser of one command, global options included, or of none: the overall help. Nonsense
    is a CtlError."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            self.print_usage(sys.stderr)
            raise errors.CtlError(message, errors.USAGE)

    shared = common.global_options()
    if command:
        module = importlib.import_module(f"pvrd.ctl.{command}")
        parser = Parser(
            f"pvrctl {command}",
            description=(module.__doc__ or "").partition("\n")[0],
            parents=[shared],
            allow_abbrev=False,
        )
        module.arguments(parser)
        parser.set_defaults(run=module.run)
        return parser
    lines = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    parser = Parser(
        "pvrctl",
        usage="pvrctl [--bus user|system|ADDRESS] [--json] COMMAND …",
        parents=[shared],
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Talks to pvrd, the accelerator daemon.",
        epilog=f"commands:\n{lines}\n\n`pvrctl COMMAND --help` says more of each, pvrctl(1) all.",
    )
    parser.add_argument("--version", action="version", version=f"pvrctl {__version__}")
    return parser


def split(argv: list[str]) -> tuple[list[str], str, list[str]]:
    """Global options, the command, and its own arguments; the command is empty where none was
    given."""
    index = 0
    while index < len(argv) and argv[index].startswith("-"):
        index += 2 if argv[index] == "--bus" else 1
    if index >= len(argv):
        return argv, "", []
    return argv[:index], argv[index], argv[index + 1 :]


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of the command; `run` is the command's function.

    Raises:
        CtlError: nonsense.
        SystemExit: a help text was wanted, and printed.
    """
    first, command, rest = split(argv)
    overall = parser_for("")
    args = overall.parse_args(first)
    if not command:
        overall.error("no command; `pvrctl --help` lists them")
    if command not in COMMANDS:
        overall.error(f"there is no command {command!r}; `pvrctl --help` lists them")
    args = parser_for(command).parse_args(rest, namespace=args)
    args.bus = getattr(args, "bus", None)
    args.json = getattr(args, "json", False)
    return args


def _terminated(signum: int, _frame: FrameType | None) -> NoReturn:
    # Like Ctrl-C: the jobs in the daemon are cancelled and unfinished files removed on the way out.
    raise errors.Terminated


def _standard_streams() -> None:
    """Fills the places of closed standard descriptors, or the next file opened would take them.

    Output that was closed goes to a descriptor that refuses it: that is an error to be told, not
    to be swallowed.
    """
    for fd, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, flags)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    # What the terminal's encoding lacks, and names that are no text, are shown as ?.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _let_go(broken: KeyboardInterrupt) -> None:
    """Collects what was broken off, which may be half made and then complains, here and quietly."""
    import traceback

    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        traceback.clear_frames(broken.__traceback__)
    finally:
        sys.unraisablehook = hook


def _discard_output() -> None:
    # What is still buffered must not fail once more when Python ends.
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def main(argv: list[str] | None = None) -> int:
    """Runs pvrctl and returns its exit code; the one boundary for errors, no traceback leaves."""
    _standard_streams()
    arguments = sys.argv[1:] if argv is None else argv
    before = signal.getsignal(signal.SIGINT)
    try:
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _terminated)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
            signal.signal(signal.SIGHUP, _terminated)
        args = parse(arguments)
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as broken:
        _let_go(broken)
        return errors.INTERRUPTED
    except SystemExit as done:
        # argparse printed a help text.
        try:
            sys.stdout.flush()
        except OSError:
            _discard_output()
            return errors.FAILED
        return int(done.code or 0)
    except BrokenPipeError:
        # Nobody reads any more: nothing to say, and nobody to say it to.
        _discard_output()
        return errors.FAILED
    except errors.CtlError as error:
        failure = error
    except OSError as error:
        where = error.filename or ("Standard output" if error.errno in _OUTPUT_ERRORS else "")
        what = os.strerror(error.errno) if error.errno else str(error)
        failure = errors.CtlError(f"{where}: {what}." if where else f"{what}.")
    except Exception as error:
        if os.environ.get("PVRCTL_DEBUG"):
            raise
        failure = errors.CtlError(
            f"Internal error ({type(error).__name__}: {error}); PVRCTL_DEBUG=1 shows where.",
            errors.FAILED,
            "Internal",
        )
    finally:
        signal.signal(signal.SIGINT, before)  # once more: nothing is left to be undone
    return _say(failure, "--json" in arguments)


def _say(failure: errors.CtlError, as_json: bool) -> int:
    with contextlib.suppress(OSError):  # the exit code tells it, too
        sys.stderr.write(f"pvrctl: {failure}\n")
    try:
        if as_json:
            from pvrd.ctl.output import emit_json

            code = failure.code
            name = failure.name or ("Usage" if code == errors.USAGE else "Failed")
            emit_json({"error": name, "message": str(failure), "exit_code": code})
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return failure.code


if __name__ == "__main__":
    sys.exit(main())
