# SPDX-License-Identifier: Apache-2.0
"""Says what a text says, as JSON that fits a schema."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

from pvrd.ctl import common, errors, generate, output

if TYPE_CHECKING:
    import argparse

MOST_BYTES = 1 << 16  # of a schema (docs/api.md)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl extract`."""
    generate.session_options(parser)
    generate.kv_option(parser)
    parser.add_argument(
        "--instruction", metavar="TEXT", help="what to look for, instead of the schema"
    )
    parser.add_argument(
        "-n", "--max-tokens", type=common.at_least(1), metavar="N", help="tokens at most (256)"
    )
    parser.add_argument("schema", help="a JSON schema: a file, or the text itself")
    parser.add_argument("text", help="the text, or - for standard input")


def _read(name: str) -> str:
    """The schema in a file.

    Raises:
        CtlError: it cannot be read.
    """
    try:
        with open(name, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) <= MOST_BYTES:
            return data.decode("utf-8")
        why = f"it has more than {MOST_BYTES >> 10} KiB"
    except OSError as error:
        why = os.strerror(error.errno or 0)
    except ValueError:  # a name with NUL, too
        why = "it is not UTF-8"
    raise errors.CtlError(
        f"The schema {output.plain(name)} cannot be read: {why}.",
        errors.BAD_INPUT,
        "InvalidArgument",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl extract`.

    Raises:
        CtlError: the schema cannot be read.
    """
    schema = args.schema
    if not schema.lstrip().startswith("{"):
        schema = _read(schema)
    text = generate.prompt_text(args.text, raw=False)
    given = {"instruction": args.instruction, "max_tokens": args.max_tokens}
    with (
        common.client(args) as client,
        client.open_text(generate.session_settings(args)) as session,
    ):
        common.wait_ready(session, args)
        found = session.extract(text, schema, {k: v for k, v in given.items() if v is not None})
    # Indented for people, in a line for programs.
    indent = None if args.json or not sys.stdout.isatty() else 2
    sys.stdout.write(json.dumps(json.loads(found), ensure_ascii=False, indent=indent) + "\n")
    return errors.OK
