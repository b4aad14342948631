# SPDX-License-Identifier: Apache-2.0
"""What a node of an operation has: how many inputs and weights, which attributes, of what type and
in what range; FORMS for the operations of a Graph.

Whoever reads a node behind `Graph.check` may take all this for granted; that the sizes of nodes and
weights fit each other is another question (engine/widths.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernels.swiglu.op import ACTS

MAX_WIDTH = 1 << 24  # of anything that is counted in elements


@dataclass(frozen=True)
class Attribute:
    """`fits` says whether a value of any type is one; `words` what it should be, for people."""

    fits: Callable[[Any], bool]
    words: str
    needed: bool = True


@dataclass(frozen=True)
class Form:
    """Least and most inputs and weights, and the attributes by name. No others are known."""

    inputs: tuple[int, int]
    weights: tuple[int, int] = (0, 0)
    attrs: Mapping[str, Attribute] = field(default_factory=dict)


def whole(least: int, most: int, needed: bool = True) -> Attribute:
    """A whole number, both ends included."""

    def fits(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    return Attribute(fits, f"a whole number from {least} to {most}", needed)


def real(least: float, most: float, needed: bool = True) -> Attribute:
    """A number from `least` to below `most`; NaN is in no range."""

    def fits(value: Any) -> bool:
        return type(value) in (int, float) and least <= value < most

    return Attribute(fits, f"a number from {least:g} to {most:g}", needed)


def flag(needed: bool = True) -> Attribute:
    """True or false."""
    return Attribute(lambda value: type(value) is bool, "true or false", needed)


def word(*known: str, needed: bool = True) -> Attribute:
    """One of these words; any, where none is given."""

    def fits(value: Any) -> bool:
        return isinstance(value, str) and (not known or value in known)

    return Attribute(fits, " or ".join(known) or "a name", needed)


_SIZE, _POSITION = whole(1, MAX_WIDTH), whole(0, (1 << 31) - 1, needed=False)
_EPS = real(1e-30, 1.0)
_INSIDE = {"inside": flag(needed=False)}
_MATRIX = {"n": _SIZE, "k": _SIZE}
_HEADS = {"heads": _SIZE, "dim": _SIZE}
_GROUPED = {**_HEADS, "kv_heads": _SIZE}
_NORM = {"eps": _EPS, "whole": flag()}
_TURN = {"rope_dims": _SIZE, "neox": flag(), "short_context": _POSITION}
_LAYER = {"layer": whole(0, MAX_WIDTH)}
_SCORES = {
    "scale": real(0.0, 100.0), "window": whole(0, (1 << 31) - 1), "softcap": real(0.0, 1e6),
}  # fmt: skip
_EXPERTS = {**_MATRIX, "experts": _SIZE, "used": _SIZE}

ONE, TWO, MANY = (1, 1), (2, 2), (1, 1 << 16)
FORMS: Mapping[str, Form] = {
    "lookup": Form(ONE, ONE, {"k": _SIZE, "scale": real(0.0, 1e6, needed=False)}),
    "rms_norm": Form((1, 2), ONE, {"k": _SIZE, "eps": _EPS, "last": flag(), **_INSIDE}),
    "linear": Form((1, 2), MANY, _MATRIX),
    "bias": Form(ONE, ONE, {"n": _SIZE}),
    "head_norm": Form(ONE, ONE, {**_HEADS, **_NORM}),
    "rope": Form(
        ONE, (0, 2), {**_HEADS, **_TURN, "table": word(), "long_table": word(needed=False)}
    ),
    "attention": Form((3, 3), (0, 0), {**_GROUPED, **_LAYER, **_SCORES}),
    "qk_norm": Form(ONE, ONE, {**_GROUPED, **_NORM}),
    "rope_kv": Form(ONE, (1, 2), {**_GROUPED, **_TURN, **_LAYER, **_INSIDE}),
    "attend": Form(ONE, (0, 0), {**_GROUPED, **_LAYER, **_SCORES}),
    "silu": Form(ONE),
    "gelu": Form(ONE),
    "mul": Form(TWO),
    "add": Form(TWO),
    "swiglu": Form(ONE, (0, 0), {"f": _SIZE, "act": word(*ACTS), "each": _SIZE, **_INSIDE}),
    "route": Form(ONE, (0, 0), {"experts": _SIZE, "used": _SIZE, "norm": flag()}),
    "expert_linear": Form(TWO, (1, 2), _EXPERTS),
    "expert_sum": Form((2, 3), ONE, _EXPERTS),
    "row_gate": Form(TWO, (0, 0), {"n": _SIZE}),
    "softcap": Form(ONE, (0, 0), {"v": _SIZE, "cap": real(1e-30, 1e6)}),
    "topk": Form(ONE, (0, 0), {"v": _SIZE}),
}


def misfit(form: Form, op: str, inputs: int, weights: int, attrs: Mapping[str, Any]) -> str:
    """What is wrong with a node of an operation, as the end of a sentence about it; "" when nothing
    is.
    """
    for what, count, (least, most) in (
        ("inputs", inputs, form.inputs), ("weights", weights, form.weights),
    ):  # fmt: skip
        if not least <= count <= most:
            return f"has {count} {what}"
    for key, attribute in form.attrs.items():
        if key not in attrs:
            if attribute.needed:
                return f"lacks {key}"
        elif not attribute.fits(attrs[key]):
            return f"has no right {key}: it has to be {attribute.words}"
    if unknown := [key for key in attrs if key not in form.attrs]:
        return f"has {str(unknown[0])[:40]!r}, which no {op} has"
    # The second table is for sessions that are longer than that.
    if op in ("rope", "rope_kv") and weights == 2 and "short_context" not in attrs:
        return "lacks short_context"
    return ""
