# SPDX-License-Identifier: Apache-2.0
"""Talks with a model, turn by turn.

/new forgets the talk, /exit or the end of input ends it. Ctrl-C cancels the answer under way in the
daemon.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pvrd.ctl import common, errors, generate, output

if TYPE_CHECKING:
    import argparse

    from pvrd.client import TextSession


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl chat`."""
    generate.text_options(parser)


def _ask(interactive: bool) -> str | None:
    """The next line of the person; None at the end of input."""
    if interactive:
        try:
            return input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl chat`."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        # Line editing; imported for its effect on input().
        import readline  # noqa: F401
    with (
        common.client(args) as client,
        client.open_text(generate.session_settings(args)) as session,
    ):
        common.wait_ready(session, args)
        if interactive:
            sys.stdout.write("/new forgets the talk, /exit ends it.\n")
        _talk(session, args, interactive)
    return errors.OK


def _talk(session: TextSession, args: argparse.Namespace, interactive: bool) -> None:
    from pvrd.errors import PvrdError

    first = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(first)
    while (line := _ask(interactive)) is not None:
        word = line.strip()
        if word in ("/exit", "/quit"):
            return
        if word == "/new":
            messages = list(first)
            continue
        if not word:
            continue
        messages.append(
            {
                "role": "user",
                "content": generate.prompt_text(line, raw=True) if line != "-" else line,
            }
        )
        try:
            done = generate.answer(
                session, messages, "", generate.job_settings(args), show=not args.json
            )
        except KeyboardInterrupt:
            if not interactive:
                raise
            # The answer is dropped with its question, the talk goes on.
            messages.pop()
            sys.stdout.write("\n")
            continue
        except PvrdError as error:
            if error.name != "ContextFull" or not interactive:
                raise
            messages.pop()
            output.warn(f"{output.plain(str(error))} /new starts afresh.")
            continue
        record = done.record(False)
        messages.append({"role": "assistant", "content": record["text"]})
        if args.json:
            output.emit_json(record)
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()
            common.speed_note(record)
