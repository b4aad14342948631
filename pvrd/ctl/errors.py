# SPDX-License-Identifier: Apache-2.0
"""The exit codes of pvrctl, and the one exception that carries a sentence and a code to main."""

from __future__ import annotations

OK = 0
FAILED = 1
USAGE = 2
NO_DAEMON = 3
REFUSED = 4
BAD_INPUT = 5
INTERRUPTED = 130

_CODES = {
    "NotAuthorized": REFUSED,
    "QuotaExceeded": REFUSED,
    "Busy": REFUSED,
    "OutOfMemory": REFUSED,
    "InvalidArgument": BAD_INPUT,
    "UnknownModel": BAD_INPUT,
    "BadModel": BAD_INPUT,
    "UnsupportedModel": BAD_INPUT,
    "ContextFull": BAD_INPUT,
    "NoDaemon": NO_DAEMON,
}


class CtlError(Exception):
    """Ends the command with one plain sentence on stderr and the exit code."""

    def __init__(self, sentence: str, code: int = FAILED, name: str = "") -> None:
        super().__init__(sentence)
        self.code = code
        self.name = name


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: undone like Ctrl-C, but nothing goes on after it."""


def code_of(name: str) -> int:
    """The exit code for an error name of the closed list (docs/api.md)."""
    return _CODES.get(name, FAILED)
