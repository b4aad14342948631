# SPDX-License-Identifier: Apache-2.0
"""Values on D-Bus: Python's as variants, and variants as Python's."""

from __future__ import annotations

from typing import Any

from pvrd.bus import Variant


def V(signature: str, value: Any) -> Variant:
    """A variant of this type."""
    return Variant(signature, value)


def variant(value: Any) -> Variant:
    """A variant of the type that goes with a Python value; dicts and lists become a{sv}, as, av."""
    if isinstance(value, Variant):
        return value
    if isinstance(value, bool):
        return Variant("b", value)
    if isinstance(value, int):
        if value < 0:
            return Variant("x", value)
        return Variant("u" if value < 1 << 32 else "t", value)
    if isinstance(value, float):
        return Variant("d", value)
    if isinstance(value, dict):
        return Variant("a{sv}", {str(k): variant(v) for k, v in value.items() if v is not None})
    if isinstance(value, (list, tuple, set, frozenset)):
        if all(isinstance(v, str) for v in value):
            return Variant("as", list(value))
        return Variant("av", [variant(v) for v in value])
    return Variant("s", str(value))


def plain(value: Any) -> Any:
    """The value without variants, all the way down."""
    if isinstance(value, Variant):
        return plain(value.value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value
