# SPDX-License-Identifier: Apache-2.0
"""conv3x3_winograd: conv3x3 by Winograd's F(2x4, 3x3), for layers of many channels on CPUs.

Layouts as kernels/conv3x3. Of each row the first `cols` columns mean something. cin and cout are
multiples of 8, rows of 2, cols of 4; xs is at least LEAST_XS. A value depends also on what lies in
its group of 2 rows and 4 columns from the map's corner on, by rounding alone (about 1e-6 of the
largest input); so x has to have values that mean something for whole groups: `needed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kernels.contract import Contract, Groups, Variant, ceil_div
from kernels.conv3x3 import op as conv3x3

LEAST_XS = 64  # columns that the widest CPU vectors take at once
LEAST_CHANNELS = 24  # with fewer the transforms cost what the products save
STEP = 4


def suits(cin: int, cout: int) -> bool:
    """Is it the faster way for a layer, and does it do that?"""
    return min(cin, cout) >= LEAST_CHANNELS and cin % 8 == cout % 8 == 0


def needed(convs: Iterable[tuple[int, int]], cols: int) -> list[int]:
    """For a chain of convolutions (inputs, outputs) of which the last gives `cols` columns: the
    columns that each has to give, before them those of the chain's input.
    """
    found = [cols]
    for cin, cout in reversed(list(convs)):
        if suits(cin, cout):
            found[-1] = ceil_div(found[-1], STEP) * STEP
        found.append(found[-1] + 2)
    return found[::-1]


def _groups(push: Mapping[str, Any], variant: Variant) -> Groups:
    return 1, 1, 1


OP = Contract(
    name="conv3x3_winograd",
    bindings=conv3x3.OP.bindings,
    push=(
        ("cin", "u32"),
        ("cout", "u32"),
        ("rows", "u32"),
        ("cols", "u32"),
        ("xs", "u32"),
        ("x_tile", "u32"),
        ("y_tile", "u32"),
    ),
    variants=(Variant("cpu", (1, 1, 1)),),
    groups=_groups,
    reference=conv3x3.reference,
)
