# SPDX-License-Identifier: Apache-2.0
"""Talks with a model, turn by turn.

A line that ends in a backslash goes on in the next, three quotation marks begin and end a message
of several lines. /help lists the commands. Ctrl-C cancels the answer under way in the daemon; the
talk goes on.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from pvrd.ctl import chat_commands, chat_input, common, errors, generate, output
from pvrd.ctl.chat_talk import Talk

if TYPE_CHECKING:
    import argparse

# After these nothing can be asked any more, as the daemon or the session is gone.
_FATAL = ("NoDaemon", "NoSuchSession", "ShuttingDown", "Internal")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl chat`."""
    generate.text_options(parser)
    parser.add_argument(
        "--no-history", action="store_true", help="neither read nor keep what is typed"
    )


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl chat`."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(common.client(args))
        session = stack.enter_context(client.open_text(generate.session_settings(args)))
        common.wait_ready(session, args)
        talk = Talk(session, generate.job_settings(args), args.system or "", args.json)
        if interactive:
            history = None if args.no_history else chat_input.history_file()
            stack.enter_context(chat_input.line_editing(history))
            sys.stdout.write("/help lists the commands, /exit ends the talk.\n")
        _loop(talk, interactive)
    return errors.OK


def _loop(talk: Talk, interactive: bool) -> None:
    """Takes message after message, until /exit or the end of input. On a terminal a mistake or a
    refusal is told and the talk goes on; elsewhere it ends the program.
    """
    line = chat_input.terminal_line if interactive else chat_input.piped_line
    while True:
        try:
            text = chat_input.message(line)
            if text is None or not _turn(talk, text):
                return
        except KeyboardInterrupt as broken:
            if not interactive or isinstance(broken, errors.Terminated):
                raise
            sys.stdout.write("\n")
        except errors.CtlError as error:
            if not interactive:
                raise
            output.warn(str(error))


def _turn(talk: Talk, text: str) -> bool:
    """One message or command; False when it ends the talk.

    Raises:
        CtlError: what the message, the command or the daemon's refusal amounts to.
    """
    from pvrd.errors import PvrdError

    try:
        if text.startswith("/"):
            return chat_commands.run(talk, text)
        if text.strip():
            talk.ask(generate.prompt_text(text, raw=True) if text != "-" else text)
    except PvrdError as error:
        if error.name in _FATAL:
            raise
        sentence = output.sentence(str(error))
        raise errors.CtlError(sentence, errors.code_of(error.name), error.name) from error
    return True
