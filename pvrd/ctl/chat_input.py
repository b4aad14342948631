# SPDX-License-Identifier: Apache-2.0
"""What a person types into a chat: lines, messages of several lines, and the history of both."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pvrd.ctl import errors

PROMPT, MORE = "> ", "… "
BLOCK = '"""'
KEPT = 1000  # lines of the history
MOST_LINE = 1 << 20  # characters; the daemon takes messages of as many bytes


def history_file() -> Path:
    """Where the history of a user lies."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        base = str(Path.home() / ".local/state")
    return Path(base) / "pvrd/chat_history"


@contextlib.contextmanager
def line_editing(file: Path | None) -> Iterator[None]:
    """Gives input() line editing, and the history of earlier chats where `file` keeps one; the
    lines of this one are added to it in the end. A history that cannot be read or written is done
    without.
    """
    import readline

    if file is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(file)
    before = readline.get_current_history_length()
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                _keep(file, readline.get_current_history_length() - before)


def _keep(file: Path, lines: int) -> None:
    """Adds the last lines to the file, which nobody else may read."""
    import readline

    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    readline.set_history_length(KEPT)
    readline.append_history_file(lines, file)


def terminal_line(prompt: str) -> str | None:
    """The next line typed; None at the end of input."""
    try:
        return input(prompt)
    except EOFError:
        sys.stdout.write("\n")
        return None


def piped_line(_prompt: str) -> str | None:
    """The next line of standard input; None at its end.

    Raises:
        CtlError: it is longer than any message may be.
    """
    line = sys.stdin.readline(MOST_LINE + 1)
    if len(line) > MOST_LINE:
        raise errors.CtlError(
            f"A line has more than {MOST_LINE} characters.", errors.BAD_INPUT, "InvalidArgument"
        )
    return line.removesuffix("\n") if line else None


def message(line: Callable[[str], str | None]) -> str | None:
    """The next message, from what `line` gives for a prompt; None at the end of input.

    A line that ends in a backslash goes on in the next one. What begins with three quotation marks
    ends with the next three at the end of a line. The end of input ends a message, too.
    """
    first = line(PROMPT)
    if first is None:
        return None
    if first.lstrip().startswith(BLOCK):
        return _block(first.lstrip().removeprefix(BLOCK), line)
    lines = [first]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        more = line(MORE)
        if more is None:
            break
        lines.append(more)
    return "\n".join(lines)


def _block(first: str, line: Callable[[str], str | None]) -> str:
    lines: list[str] = []
    text: str | None = first
    while text is not None:
        if text.rstrip().endswith(BLOCK):
            lines.append(text.rstrip().removesuffix(BLOCK))
            break
        lines.append(text)
        text = line(MORE)
    return "\n".join(lines).strip("\n")
