# SPDX-License-Identifier: Apache-2.0
"""Makes a model that pvrd runs of a language model or of a network that enlarges pictures."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, errors, output

if TYPE_CHECKING:
    import argparse

WEIGHTS = ("f16", "q8", "q4")
# Files that pvrd does not take as they are: two that belong together, and what needs PyTorch.
_SUFFIXES = (".param", ".bin", ".pth", ".pt", ".ckpt", ".safetensors")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl compile`."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a language model (Hugging Face folder, GGUF), or a network for pictures (ONNX, ncnn's"
        " .param or .bin, a checkpoint)",
    )
    parser.add_argument("-o", "--output", metavar="OUT.pvrm", help="default: beside FILE")
    weights_option(parser)
    parser.add_argument(
        "--calibrate",
        metavar="TEXT",
        help="a text file that q8 and q4 of language models are fitted to and judged by (default:"
        " a short one; none: neither)",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="say how it would run on such a device (phone, bxs-4-64 …)",
    )
    parser.add_argument("--name", help="what the model calls itself (default: the file's name)")
    parser.add_argument("--licence", help="the network's licence, to be shown by `models`")
    parser.add_argument("--explain", action="store_true", help="what was changed in the network")
    parser.add_argument(
        "--without",
        action="append",
        metavar="PASS",
        default=[],
        help="leave a pass out (norm_into_matvec, glu_into_matvec, rope_into_attention, join), for"
        " language models",
    )
    parser.add_argument(
        "--rate",
        metavar="GB/S",
        type=float,
        help="what the profile's device reads in a second, to predict tokens/s",
    )


def weights_option(parser: argparse.ArgumentParser) -> None:
    """--weights."""
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="f16",
        help="halves (f16), int8 with scales (q8), or 4 bits (q4, language models)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl compile`; no daemon takes part.

    Raises:
        CtlError: the file is no network that is run, or the result cannot be written.
    """
    more = [f"--weights={args.weights}", *(["--explain"] if args.explain else [])]
    more += [f"--without={name}" for name in args.without]
    for option in ("output", "profile", "name", "licence", "rate", "calibrate"):
        if (value := getattr(args, option)) is not None:
            more.append(f"--{option}={value}")
    if args.json:
        output.emit_json(_compiled(args.file, more))
    else:
        sys.stdout.write(output.plain(str(_compiled(args.file, more)["text"])) + "\n")
    return errors.OK


def _compiled(file: str, options: list[str]) -> dict[str, Any]:
    """What `engine.compile` says of its result."""
    done = common.run_engine("engine.compile", ["--json", *options, "--", file])
    try:
        record: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        # Wrong usage (argparse's own comes before its sentence), or a fault: its last line.
        said = done.stderr.strip().rpartition("engine.compile: error: ")[2].rpartition("\n")[2]
        code = errors.USAGE if done.returncode == errors.USAGE else errors.FAILED
        sentence = output.plain(said) or "The compiler ended without a word."
        raise errors.CtlError(sentence, code) from None
    if "error" in record:
        name, sentence = str(record["error"]), output.plain(str(record["message"]))
        raise errors.CtlError(sentence, errors.code_of(name), name)
    return record


@contextlib.contextmanager
def ready(file: str, weights: str) -> Iterator[str]:
    """The path of a file that pvrd takes: this one, or one that is compiled of it for as long as
    the context lasts.

    Raises:
        CtlError: as `run`.
    """
    if not file.lower().endswith(_SUFFIXES) and not os.path.isdir(file):
        yield file
        return
    with tempfile.TemporaryDirectory(prefix="pvrctl-") as folder:
        path = os.path.join(folder, "model.pvrm")
        name = os.path.splitext(os.path.basename(os.path.abspath(file)))[0]
        _compiled(file, [f"--output={path}", f"--name={name}", f"--weights={weights}"])
        yield path
