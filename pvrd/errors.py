# SPDX-License-Identifier: Apache-2.0
"""The errors that a caller reads: a closed list, one D-Bus name each, one plain sentence each."""

from __future__ import annotations

import errno

PREFIX = "org.pvrd.Pvrd1.Error."


class PvrdError(Exception):
    """Base of the list in docs/api.md; the class name is the error's name."""

    @property
    def name(self) -> str:
        """The name without prefix, as it stands in a stream's `error` line."""
        return type(self).__name__

    @property
    def bus_name(self) -> str:
        """The name on D-Bus."""
        return PREFIX + self.name


class NotAuthorized(PvrdError):
    """polkit says no, or is not there."""


class QuotaExceeded(PvrdError):
    """The caller's UID has too much already, or the disk has no room."""


class Busy(PvrdError):
    """The session or the queue has no place now."""


class InvalidArgument(PvrdError):
    """A request that makes no sense."""


class UnknownModel(PvrdError):
    """No such model."""


class BadModel(PvrdError):
    """A file that is damaged or no model."""


class UnsupportedModel(PvrdError):
    """A sound model of a kind that pvrd does not run, or of the wrong kind for the method."""


class OutOfMemory(PvrdError):
    """Not enough memory; the message has figures."""


class ContextFull(PvrdError):
    """Prompt and answer do not fit the context."""


class DeviceLost(PvrdError):
    """No device can do it."""


class Cancelled(PvrdError):
    """The job was cancelled before it ended."""


class Timeout(PvrdError):
    """No answer in time."""


class SlowReader(PvrdError):
    """The reader of a stream did not read."""


class ShuttingDown(PvrdError):
    """The daemon is ending."""


class NoSuchSession(PvrdError):
    """Not there, closed, or another's."""


class Internal(PvrdError):
    """A fault of pvrd's own."""


NAMES: dict[str, type[PvrdError]] = {
    c.__name__: c
    for c in (
        NotAuthorized, QuotaExceeded, Busy, InvalidArgument, UnknownModel, BadModel,
        UnsupportedModel, OutOfMemory, ContextFull, DeviceLost,
        Cancelled, Timeout, SlowReader, ShuttingDown,
        NoSuchSession, Internal,
    )
}  # fmt: skip


def from_name(name: object, message: object) -> PvrdError:
    """The error that a worker reported; a name outside the list becomes Internal.

    Control characters and excess length are taken out: the text goes to users and to the journal.
    """
    text = "".join(c if c.isprintable() else " " for c in str(message))[:1000]
    return NAMES.get(str(name), Internal)(text)


def shortage(error: Exception) -> PvrdError | None:
    """OutOfMemory where the system has no more descriptors or memory to give, else None."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return OutOfMemory(f"pvrd gets no more from the system: {error.strerror}")
    return None


class StartError(Exception):
    """pvrd cannot start; the message is one sentence for the person who started it."""
