# SPDX-License-Identifier: Apache-2.0
"""What OpenVideo and Upscale ask for: a size, and the models that may be used to get there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pvrd.errors import InvalidArgument
from pvrd.models import Model, ModelStore

MOST = 8  # times as wide or high a result may be
TIERS = ("fast", "balanced", "quality")  # names for nsr-…


def check_sides(chosen: Mapping[str, Any]) -> None:
    """Raises InvalidArgument when only one of out_width and out_height is given."""
    if (chosen["out_width"] is None) != (chosen["out_height"] is None):
        raise InvalidArgument("the options out_width and out_height are given together")


def out_size(chosen: Mapping[str, Any]) -> tuple[int, int]:
    """The size of the enlarged frames of a session.

    Raises:
        InvalidArgument: a side is shorter than that of the input, or more than MOST times as long.
    """
    check_sides(chosen)
    found = []
    for side in ("width", "height"):
        size, wanted = chosen[side], chosen[f"out_{side}"]
        wanted = int(chosen["scale"] * size + 0.5) if wanted is None else wanted
        if not size <= wanted <= MOST * size:
            raise InvalidArgument(
                f"the option 'out_{side}' is {size} to {MOST * size} for {size}, not {wanted}"
            )
        found.append(wanted)
    return found[0], found[1]


def family(store: ModelStore, name: str, ratio: float | None) -> list[Model]:
    """The models that a frame may be enlarged with: the one of this name (a tier's, or "" for the
    default) first, then those of the same kind for other scales, NAME-x3 and NAME-x4, where they
    may be of use. ratio: how much larger it becomes, None while that is not known.

    Raises:
        InvalidArgument, UnknownModel, UnsupportedModel: as ModelStore.find.
    """
    models = store.all()
    if name.startswith(TIERS) and name not in models:
        name = f"nsr-{name}"
    first = store.find(name, "video")
    if ratio is not None and ratio <= 2:
        return [first]
    others = (models.get(f"{first.name}-x{scale}") for scale in (3, 4))
    return [first, *(other for other in others if other and other.kind == "video")]


def smaller(store: ModelStore, first: Model, ratio: float) -> list[list[Model]]:
    """Families of smaller networks than this model's, the largest first: the lower tiers of its own
    kind, of somebody else's network the fast tier.
    """
    found = re.fullmatch(r"nsr-(fast|balanced|quality)(-compressed|)(-x\d)?", first.name)
    tiers = TIERS[: TIERS.index(found[1])] if found else TIERS[:1]
    kind = found[2] if found else ""
    models = store.all()
    out = []
    for tier in reversed(tiers):
        name = f"nsr-{tier}{kind}"
        model = models.get(name)
        if model is not None and model.kind == "video" and model.key != first.key:
            out.append(family(store, name, ratio))
    return out
