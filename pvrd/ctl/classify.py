# SPDX-License-Identifier: Apache-2.0
"""Says which of some labels fits a text best."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pvrd.ctl import common, errors, generate, output

if TYPE_CHECKING:
    import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl classify`."""
    generate.session_options(parser)
    parser.add_argument(
        "--question", metavar="TEXT", help="asked before the text; names the labels by default"
    )
    parser.add_argument(
        "--raw-scores",
        action="store_true",
        help="do not take off what a label is worth without a text",
    )
    parser.add_argument("-l", "--label", action="append", required=True, help="given twice or more")
    parser.add_argument("text", help="the text, or - for standard input")


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl classify`."""
    text = generate.prompt_text(args.text, raw=False)
    given = {"question": args.question, "calibrate": False if args.raw_scores else None}
    with (
        common.client(args) as client,
        client.open_text(generate.session_settings(args)) as session,
    ):
        common.wait_ready(session, args)
        settings = {k: v for k, v in given.items() if v is not None}
        label, scores = session.classify(text, args.label, settings)
    if args.json:
        output.emit_json({"label": label, "scores": scores})
        return errors.OK
    for name, share in sorted(scores.items(), key=lambda pair: -pair[1]):
        sys.stdout.write(f"{share:7.1%}  {output.plain(name)}\n")
    return errors.OK
