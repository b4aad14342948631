# SPDX-License-Identifier: Apache-2.0
"""Errors that reach a user: each has the name that it carries on D-Bus and one plain sentence."""

from __future__ import annotations


class PvrError(Exception):
    """Base of all errors that a caller is to read; `name` is one of the list in docs/api.md."""

    name = "Internal"


class InvalidArgument(PvrError):
    """The request makes no sense."""

    name = "InvalidArgument"


class BadModel(PvrError):
    """The file is damaged or no model at all."""

    name = "BadModel"


class UnsupportedModel(PvrError):
    """The model is well formed, but of a kind that pvrd does not run."""

    name = "UnsupportedModel"


class OutOfMemory(PvrError):
    """The request needs more memory than there is; the message has the figures."""

    name = "OutOfMemory"


class ContextFull(PvrError):
    """Prompt and answer do not fit the context."""

    name = "ContextFull"


class DeviceLost(PvrError):
    """The device went away, hung or reported loss; the worker that meets it ends."""

    name = "DeviceLost"
