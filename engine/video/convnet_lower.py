# SPDX-License-Identifier: Apache-2.0
"""Net + window + device -> Program.

Buffers: `params`, `weights` and `planes` (weights), `in0`.. (input) the rows of each plane that the
window needs, `b0`.. (scratch) the network's values, `out0`.. (output) the window's rows of each
enlarged plane. Sequences: `first` (planes to maps), `part0`.. (the network, in parts of about equal
work), `last` (maps to planes), and `planes` (those that no network enlarges) where there are any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from engine.backends.base import DeviceInfo
from engine.errors import InvalidArgument
from engine.graph import Node
from engine.program import Binding, Buffer, Call, Program
from engine.variants import Allow, allow_all, choose
from engine.video import convnet_pack
from engine.video.convnet_colour import FILTER_BYTES, Plane, plane_filters
from engine.video.convnet_graph import INPUT, Net
from engine.video.convnet_layout import Buffers, Layout, buffers, layout
from kernels import maps
from kernels import op as contract_of
from kernels.contract import FORMATS, PARAM_WORDS
from kernels.conv2d.op import MATRIX_K
from kernels.maps import Geometry
from kernels.pointwise.op import ALONE, PRODUCT, SUM

ACTS = {"slope": maps.SLOPE, "silu": maps.SILU, "sigmoid": maps.SIGMOID, "gate": maps.GATE}
PART_MACS = 4_000_000_000  # multiplications of a part
ROWS = 4  # a convolution is cut between so many rows: a tile of Winograd's


@dataclass(frozen=True)
class Plan:
    """What is the same for every window: the network, where its values lie, and its weights."""

    net: Net
    fmt: str
    layout: Layout
    buffers: Buffers
    borders: Mapping[Fraction, int]
    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    nbytes: int  # of the weights
    radius: int  # samples of the input around one that its result depends on
    macs: int  # multiplications for a sample of the input
    sample_bytes: int  # of all buffers, for a sample of the input
    multiple: int  # of which a window's sides have to be multiples

    @property
    def scale(self) -> int:
        return self.net.scale


def plan(net: Net, fmt: str) -> Plan:
    """The plan of an aligned network.

    Raises:
        UnsupportedModel: more channels than are run.
    """
    made = layout(net)
    held = buffers(net, made)
    found = convnet_pack.sizes(net, made, fmt)
    offsets, nbytes = convnet_pack.offsets(found)
    borders: dict[Fraction, int] = {v.scale: 1 for v in net.values.values()}
    reach: dict[str, Fraction] = {INPUT: Fraction(0)}
    macs = Fraction(0)
    for node in net.nodes:
        source, value = net.values[node.inputs[0]], net.values[node.output]
        around = max(reach[v] for v in node.inputs)
        if node.op == "conv":
            k = node.int("k")
            borders[source.scale] = max(borders[source.scale], k // 2)
            around += Fraction(k // 2) / source.scale
            macs += source.channels * value.channels * k * k * value.scale**2
        elif node.op in ("resize", "shuffle"):
            around += Fraction(int(node.attrs.get("taps", 1))) / min(source.scale, value.scale)
        reach[node.output] = around
    per_sample = sum(
        4 * lanes * blocks * scale**2
        for (scale, lanes), blocks in zip(held.kinds, held.blocks, strict=True)
    )
    multiple = int(np.lcm.reduce([v.scale.denominator for v in net.values.values()]))
    return Plan(
        net,
        fmt,
        made,
        held,
        borders,
        offsets,
        found,
        nbytes,
        math.ceil(reach[net.output]),
        math.ceil(macs),
        math.ceil(per_sample),
        multiple,
    )


def lower(
    given: Plan,
    planes: tuple[Plane, ...],
    width: int,
    height: int,
    device: DeviceInfo,
    part_macs: int,
    allow: Allow = allow_all,
) -> Program:
    """The Program for windows of width x height samples.

    Raises:
        InvalidArgument: a buffer does not fit the device's largest binding.
    """
    return _Lowering(given, planes, width, height, device, part_macs, allow).program()


def _plain(allow: Allow, op: str, variant: str) -> bool:
    """Those variants alone that have no limits of their own."""
    return contract_of(op).variant(variant).baseline and allow(op, variant)


class _Lowering:
    def __init__(
        self,
        given: Plan,
        planes: tuple[Plane, ...],
        width: int,
        height: int,
        device: DeviceInfo,
        part_macs: int,
        allow: Allow,
    ) -> None:
        self.plan, self.net, self.planes = given, given.net, planes
        self.width, self.height = width, height
        self.device, self.part_macs, self.allow = device, part_macs, allow
        self.buffers = {
            "params": Buffer("params", 4 * PARAM_WORDS, "params"),
            "weights": Buffer("weights", given.nbytes, "weight"),
        }
        for i, ((scale, lanes), blocks) in enumerate(
            zip(given.buffers.kinds, given.buffers.blocks, strict=True)
        ):
            self._buffer(f"b{i}", self._geometry(scale).nbytes(blocks, lanes), "scratch")

    def program(self) -> Program:
        sequences: dict[str, tuple[Call, ...]] = {}
        for i, plane in enumerate(self.planes):
            self._buffer(f"in{i}", plane.in_rows(self.height) * 4 * plane.stride, "input")
            rows = plane.out_rows(self.height, self.plan.scale)
            self._buffer(f"out{i}", rows * 4 * plane.out_stride, "output")
        filters = plane_filters(self.plan.scale)
        self.buffers["planes"] = Buffer("planes", filters.nbytes, "weight")
        sequences["first"] = tuple(self._first())
        parts: list[list[Call]] = [[]]
        work = 0
        for node in self.net.nodes:
            for call, macs in getattr(self, f"_{node.op}")(node):
                if work and work + macs > self.part_macs:
                    parts.append([])
                    work = 0
                parts[-1].append(call)
                work += macs
        sequences |= {f"part{i}": tuple(calls) for i, calls in enumerate(parts)}
        sequences["last"] = tuple(self._last())
        if rest := tuple(self._rest()):
            sequences["planes"] = rest
        program = Program(self.buffers, sequences, {"parts": len(parts)})
        program.check()
        return program

    # -- places

    def _geometry(self, scale: Fraction) -> Geometry:
        w, h = scale * self.width, scale * self.height
        return Geometry(int(w), int(h), self.plan.borders[scale])

    def _of(self, value: str) -> Geometry:
        return self._geometry(self.net.values[value].scale)

    def _buffer(self, name: str, nbytes: int, kind: Any) -> Binding:
        most = self.device.limits.max_storage_range
        if nbytes > most:
            raise InvalidArgument(
                f"A window of {self.width}x{self.height} needs a buffer of {nbytes >> 20} MiB, the"
                f" device's largest has {most >> 20} MiB: ask for smaller tiles."
            )
        self.buffers[name] = Buffer(name, nbytes, kind)
        return Binding(name)

    def _bind(self, value: str, block: int = 0) -> Binding:
        """A value's maps; `block`: from there on in its group, not from its own first."""
        place, made = self.plan.layout.places[value], self.plan.buffers
        b = made.of[place.group]
        lanes = self.plan.layout.forms[value].lanes
        return Binding(f"b{b}", 4 * lanes * self._of(value).ps * (block or place.block))

    def _weights(self, name: str) -> Binding:
        return Binding("weights", self.plan.offsets[name], self.plan.sizes[name])

    # -- calls

    def _call(
        self, name: str, push: Mapping[str, Any], *bindings: Binding, fmt: str | None = None
    ) -> Call:
        contract = contract_of(name)
        allow = self.allow
        if name == "conv2d" and push["k"] > MATRIX_K:
            allow = partial(_plain, self.allow)
        variant = choose(contract, self.device, fmt, allow, push)
        most = self.device.limits.max_workgroup_count
        groups = contract.groups({**push, "tokens": 1, "most": most}, variant)
        if any(g > m for g, m in zip(groups, most, strict=True)):
            raise InvalidArgument(
                f"The operation {name} needs {groups} workgroups, the device has {most}."
            )
        return Call(name, variant.name, bindings, contract.pack(**push), groups)

    def _conv(self, node: Node) -> list[tuple[Call, int]]:
        x, y = node.inputs[0], node.output
        source, form, g = self.plan.layout.forms[x], self.plan.layout.forms[y], self._of(y)
        fmt, cout = convnet_pack.conv_format(self.plan.fmt, source), self.net.values[y].channels
        cin, k = convnet_pack.inputs(source), node.int("k")
        residual = bool(node.attrs["residual"])
        push = {"fmt": FORMATS[fmt], "cin": cin, "cout": cout, "k": k}
        push |= {"act": ACTS[str(node.attrs["act"])], "residual": int(residual)}
        push |= {"xl": source.lanes, "yl": form.lanes, **g.push()}
        other = self._bind(node.inputs[1] if residual else x)
        bindings = (self._bind(x), self._weights(y), other, self._bind(y))
        row = self.net.values[x].channels * cout * k * k * g.w
        step = max(ROWS, self.part_macs // max(1, row) // ROWS * ROWS)
        calls = []
        for top in range(0, g.h, step):
            rows = min(step, g.h - top)
            part = {**push, "h": rows, "origin": g.origin + top * g.xs}
            calls.append((self._call("conv2d", part, *bindings, fmt=fmt), rows * row))
        return calls

    def _pointwise(
        self, y: str, mode: int, act: int, a: Binding, b: Binding, weights: Binding
    ) -> list[tuple[Call, int]]:
        form, g = self.plan.layout.forms[y], self._of(y)
        push = {"blocks": form.blocks, "lanes": form.lanes, "mode": mode, "act": act, **g.push()}
        call = self._call("pointwise", push, a, b, weights, self._bind(y))
        return [(call, 4 * g.w * g.h * form.blocks * form.lanes)]

    def _act(self, node: Node) -> list[tuple[Call, int]]:
        x, w = self._bind(node.inputs[0]), self._weights(node.output)
        return self._pointwise(node.output, ALONE, ACTS[str(node.attrs["act"])], x, x, w)

    def _affine(self, node: Node) -> list[tuple[Call, int]]:
        x, w = self._bind(node.inputs[0]), self._weights(node.output)
        return self._pointwise(node.output, ALONE, maps.SLOPE, x, x, w)

    def _sum(self, node: Node) -> list[tuple[Call, int]]:
        a, b = (self._bind(v) for v in node.inputs)
        w = self._weights(node.output)
        return self._pointwise(node.output, SUM, maps.SLOPE, a, b, w)

    def _product(self, node: Node) -> list[tuple[Call, int]]:
        a, b = (self._bind(v) for v in node.inputs)
        w = self._weights(node.output)
        return self._pointwise(node.output, PRODUCT, maps.SLOPE, a, b, w)

    def _concat(self, node: Node) -> list[tuple[Call, int]]:
        calls = []
        g = self._of(node.output)
        for part, block in self.plan.layout.copies.get(node.output, ()):
            form = self.plan.layout.forms[part]
            push = {"blocks": form.blocks, "lanes": form.lanes, "mode": ALONE}
            push |= {"act": maps.SLOPE, **g.push()}
            x = self._bind(part)
            to = self._bind(node.output)
            place = self.plan.layout.places[node.output]
            to = Binding(to.buffer, 4 * form.lanes * g.ps * block) if block else to
            if block < place.block:
                raise ValueError(f"the part {part} of {node.output} has no place")
            n = 16 * form.blocks * form.lanes
            w = Binding("weights", self.plan.offsets[convnet_pack.COPY])
            calls.append((self._call("pointwise", push, x, x, w, to), n * g.w * g.h // 4))
        return calls

    def _slice(self, node: Node) -> list[tuple[Call, int]]:
        return []  # a view

    def _shuffle(self, node: Node) -> list[tuple[Call, int]]:
        x, y = node.inputs[0], node.output
        source, form, s = self.plan.layout.forms[x], self.plan.layout.forms[y], node.int("s")
        down = bool(node.attrs["down"])
        n = self.net.values[x if down else y].channels
        order = (1, s * n, n) if node.attrs["deep"] else (s * s, s, 1)
        push: dict[str, int] = {"blocks": form.blocks, "lanes": form.lanes, "xl": source.lanes}
        push |= {"channels": n, "s": s, "down": int(down)}
        push |= dict(zip(("cs", "as", "bs"), order, strict=True))
        g = self._of(y)
        push |= {**self._of(x).push("x_"), **g.push()}
        call = self._call("pixel_shuffle", push, self._bind(x), self._bind(y))
        return [(call, 4 * g.w * g.h * form.blocks * form.lanes)]

    def _resize(self, node: Node) -> list[tuple[Call, int]]:
        x, y = node.inputs[0], node.output
        form, g, residual = self.plan.layout.forms[y], self._of(y), len(node.inputs) > 1
        push = {"blocks": form.blocks, "lanes": form.lanes, "residual": int(residual)}
        push |= {k: node.int(k) for k in ("num", "den", "taps")}
        push |= {**self._of(x).push("x_"), **g.push()}
        other = self._bind(node.inputs[1]) if residual else self._bind(x)
        call = self._call("resize", push, self._bind(x), self._weights(y), other, self._bind(y))
        return [(call, 8 * node.int("taps") * g.w * g.h * form.blocks * form.lanes)]

    # -- planes

    def _first(self) -> list[Call]:
        form, g = self.plan.layout.forms[INPUT], self._of(INPUT)
        calls: list[Call] = []
        for i, plane in enumerate(self.planes):
            for phase, tones in enumerate(plane.tones):
                push: dict[str, float] = {"phase": phase, "centred": int(plane.centred)}
                push |= {"bits": plane.bits, "stride": plane.stride, "step": plane.step}
                push |= {"half": int(plane.half), "plane_w": plane.width, "plane_h": plane.height}
                push |= {"add": int(bool(calls)), "lanes": form.lanes, **g.push()}
                names = ("c0", "c1", "c2", "o0", "o1", "o2")
                push |= dict(zip(names, tones, strict=True))
                calls.append(self._call("maps_in", push, Binding(f"in{i}"), self._bind(INPUT)))
        return calls

    def _last(self) -> list[Call]:
        output = self.net.output
        calls: list[Call] = []
        form, g = self.plan.layout.forms[output], self._of(output)
        for i, plane in enumerate(self.planes):
            if not plane.shades:
                continue
            push: dict[str, float] = {"bits": plane.bits, "stride": plane.out_stride}
            push |= {"step": plane.step, "half": int(plane.half), "centred": int(plane.centred)}
            push |= {"frame_w": self.plan.scale * plane.frame_width}
            push |= {"frame_h": self.plan.scale * plane.frame_height, "s": self.plan.scale}
            push |= {"lanes": form.lanes, **g.push(), "o": plane.offset}
            push |= dict(zip(("c0", "c1", "c2", "d0", "d1", "d2"), plane.shades, strict=True))
            calls.append(self._call("maps_out", push, self._bind(output), Binding(f"out{i}")))
        return calls

    def _rest(self) -> list[Call]:
        calls = []
        for i, plane in enumerate(self.planes):
            if plane.shades:
                continue
            push = {"bits": plane.bits, "stride": plane.stride, "out_stride": plane.out_stride}
            push |= {"step": plane.step, "half": int(plane.half), "s": self.plan.scale}
            push |= {"plane_w": plane.width, "plane_h": plane.height}
            push["rows"] = plane.out_rows(self.height, self.plan.scale)
            filters = Binding("planes", plane.filters * FILTER_BYTES, FILTER_BYTES)
            calls.append(
                self._call("plane_scale", push, Binding(f"in{i}"), filters, Binding(f"out{i}"))
            )
        return calls
