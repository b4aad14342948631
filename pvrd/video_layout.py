# SPDX-License-Identifier: Apache-2.0
"""Where planes lie in the slots of a frame ring; the rule stands in docs/architecture.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pvrd.bus import Variant
from pvrd.bus_values import V
from pvrd.enlarge import out_size

PROTOCOL = 1
DEFAULT_SLOTS = 4
STRIDE_ALIGN = 64
FRAME_ALIGN = 4096


@dataclass(frozen=True)
class Plane:
    """Offset from the start of the slot and stride in bytes; width in samples, height in rows."""

    offset: int
    stride: int
    width: int
    height: int


@dataclass(frozen=True)
class Format:
    """A frame format as it travels to the worker."""

    width: int
    height: int
    pixel: str  # i420, nv12, i444, gray
    depth: int = 8
    siting: str = "left"
    full_range: bool = False

    def sized(self, width: int, height: int) -> Format:
        """The same format in another size."""
        return replace(self, width=width, height=height)

    def sizes(self) -> list[tuple[int, int]]:
        """Samples in a row and rows of each plane."""
        w, h = self.width, self.height
        cw, ch = (w + 1) // 2, (h + 1) // 2
        chroma = {
            "gray": [], "i420": [(cw, ch), (cw, ch)], "nv12": [(2 * cw, ch)], "i444": [(w, h)] * 2,
        }  # fmt: skip
        return [(w, h), *chroma[self.pixel]]

    def planes(self, begin: int) -> list[Plane]:
        """The planes of a frame at `begin` in the slot."""
        out = []
        for width, height in self.sizes():
            stride = _up(width * (self.depth // 8), STRIDE_ALIGN)
            out.append(Plane(begin, stride, width, height))
            begin += stride * height
        return out

    def message(self) -> dict[str, Any]:
        """For the worker protocol."""
        return {
            "width": self.width, "height": self.height, "pixel": self.pixel, "depth": self.depth,
            "siting": self.siting, "full_range": self.full_range,
        }  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """The ring of a session."""

    format: Format
    out: Format
    slots: int
    slot_bytes: int
    input: tuple[Plane, ...]
    output: tuple[Plane, ...]

    @property
    def ring_bytes(self) -> int:
        """The whole ring."""
        return self.slots * self.slot_bytes

    @property
    def ratio(self) -> float:
        """How many times longer the side is that grows most."""
        return max(self.out.width / self.format.width, self.out.height / self.format.height)

    @property
    def scale(self) -> int:
        """The ratio as a whole number, for clients that know no other."""
        return round(self.ratio)

    def message(self) -> dict[str, Any]:
        """For the worker protocol."""
        return {
            "slots": self.slots,
            "slot_bytes": self.slot_bytes,
            "in": {"planes": [vars(plane) for plane in self.input]},
            "out": {"planes": [vars(plane) for plane in self.output]},
        }

    def typed(self, model: str) -> Mapping[str, Variant]:
        """For the client: the layout of OpenVideo."""
        out = self.out

        def planes(which: tuple[Plane, ...]) -> Variant:
            return V("a(tuuu)", [[p.offset, p.stride, p.width, p.height] for p in which])

        return {
            "protocol": V("u", PROTOCOL),
            "slots": V("u", self.slots),
            "slot_bytes": V("t", self.slot_bytes),
            "ring_bytes": V("t", self.ring_bytes),
            "scale": V("u", self.scale),
            "model": V("s", model),
            "pixel": V("s", self.format.pixel),
            "depth": V("u", self.format.depth),
            "width": V("u", self.format.width),
            "height": V("u", self.format.height),
            "out_width": V("u", out.width),
            "out_height": V("u", out.height),
            "in_planes": planes(self.input),
            "out_planes": planes(self.output),
        }


def lay_out(form: Format, out: Format, slots: int) -> Layout:
    """The layout for frames of this format that become `out`."""
    source = form.planes(0)
    middle = _up(_end(source), FRAME_ALIGN)
    target = out.planes(middle)
    slot_bytes = _up(_end(target), FRAME_ALIGN)
    return Layout(form, out, slots, slot_bytes, tuple(source), tuple(target))


def plan(chosen: Mapping[str, Any], free: int) -> Layout:
    """The layout for these options; fewer slots than usual where `free` bytes ask for it.

    Raises:
        InvalidArgument: as out_size.
    """
    form = Format(
        chosen["width"], chosen["height"], chosen["pixel"], chosen["depth"], chosen["siting"],
        chosen["full_range"],
    )  # fmt: skip
    out = form.sized(*out_size(chosen))
    layout = lay_out(form, out, chosen["slots"] or DEFAULT_SLOTS)
    if chosen["slots"] is None and layout.ring_bytes > free:
        layout = lay_out(form, out, max(1, free // layout.slot_bytes))
    return layout


def _end(planes: list[Plane]) -> int:
    return planes[-1].offset + planes[-1].stride * planes[-1].height


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
