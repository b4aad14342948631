# SPDX-License-Identifier: Apache-2.0
"""Prints vectors for texts; their dot products say how alike the texts are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pvrd.ctl import common, errors, generate, output

if TYPE_CHECKING:
    import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl embed`."""
    generate.session_options(parser)
    parser.add_argument(
        "--pooling", choices=["mean", "last"], help="of all tokens, or the last one's state (mean)"
    )
    parser.add_argument("texts", nargs="+", help="the texts, or - for one on standard input")


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl embed`."""
    texts = [generate.prompt_text(text, raw=False) for text in args.texts]
    with (
        common.client(args) as client,
        client.open_text(generate.session_settings(args)) as session,
    ):
        common.wait_ready(session, args)
        vectors = session.embed(texts, {"pooling": args.pooling} if args.pooling else {})
    if args.json:
        output.emit_json(vectors)
        return errors.OK
    for vector in vectors:
        sys.stdout.write(" ".join(f"{v:.6g}" for v in vector) + "\n")
    return errors.OK
