# SPDX-License-Identifier: Apache-2.0
"""Device profiles: the engine behaves as if its GPU had another device's limits and features.

A profile only lowers. Limits become the stricter of the two, features what both have; nothing that
the device lacks appears. Profiles are data, profiles/NAME.json: {"name", "about", "source" (where
the figures are from), "limits" (keys of base.Limits; one that is left out is not lowered),
"features" (names of DeviceInfo.features)}.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from engine.backends.base import DeviceInfo, Limits
from engine.errors import InvalidArgument

FOLDER = Path(__file__).with_name("profiles")
VARIABLE = "PVRD_PROFILE"
_KEYS = {f.name for f in fields(Limits)}
# Limits where the larger of two is the stricter one.
_LARGER = {"storage_align"}


@dataclass(frozen=True)
class Profile:
    """Another device, as far as the engine goes by it."""

    name: str
    about: str
    source: str
    limits: Mapping[str, int | tuple[int, int, int]]
    features: frozenset[str]

    def lower(self, info: DeviceInfo) -> DeviceInfo:
        """The device with this one's limits and features where those are less; its name says so."""
        given = vars(info.limits)
        limits = {key: _stricter(key, given[key], value) for key, value in self.limits.items()}
        return replace(
            info,
            name=f"{info.name} as {self.name}",
            limits=replace(info.limits, **limits),
            features=info.features & self.features,
            properties={**info.properties, "profile": self.name},
        )

    def alone(self) -> Limits:
        """The profile's limits on their own; the least of Vulkan where it names none."""
        limits: Mapping[str, Any] = self.limits
        return Limits(**limits)


def _stricter(key: str, a: Any, b: Any) -> Any:
    if isinstance(a, tuple):
        return tuple(min(x, y) for x, y in zip(a, b, strict=True))
    return max(a, b) if key in _LARGER else min(a, b)


def names() -> list[str]:
    """The profiles that there are."""
    return sorted(p.stem for p in FOLDER.glob("*.json"))


@functools.cache
def load(name: str) -> Profile:
    """The profile of that name.

    Raises:
        InvalidArgument: there is none; the message lists those there are.
    """
    if name not in names():
        raise InvalidArgument(f"There is no profile {name!r}; there are {', '.join(names())}.")
    found = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    if unknown := set(found["limits"]) - _KEYS:
        raise InvalidArgument(f"The profile {name} has the unknown limits {sorted(unknown)}.")
    limits = {k: tuple(v) if isinstance(v, list) else v for k, v in found["limits"].items()}
    return Profile(name, found["about"], found["source"], limits, frozenset(found["features"]))


def wanted(name: str | None) -> Profile | None:
    """The profile of that name, "" none; without a name (None) the one that $PVRD_PROFILE names.

    Raises:
        InvalidArgument: there is no such profile.
    """
    if name is None:
        name = os.environ.get(VARIABLE, "")
    return load(name) if name else None
