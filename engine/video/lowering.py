# SPDX-License-Identifier: Apache-2.0
"""Networks + a format + a tiling + what a device allows -> the Program for a band of a frame.

`in0`.. (input) hold a band of each plane as it lies in the frame, `out0`.. (output) the enlarged
band, scratch what lies between. Sequences:

- `tiles`: a slice's tiles: luma and, with a chroma network, the chroma planes of 4:2:0;
- `planes`: the band's other planes, by filters of their own; not there without such planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.backends.base import DeviceInfo
from engine.errors import InvalidArgument
from engine.graph import Graph, Node
from engine.program import Binding, Buffer, Call, Program
from engine.variants import Allow, allow_all, choose
from engine.video import fused
from engine.video.frames import FrameFormat
from engine.video.network import Networks, convolutions
from engine.video.tiles import Tiling
from kernels import op as contract_of
from kernels import video
from kernels.contract import PARAM_WORDS
from kernels.conv3x3 import op as conv3x3
from kernels.conv3x3_winograd import op as winograd


def lower(
    networks: Networks,
    device: DeviceInfo,
    fmt: FrameFormat,
    tiling: Tiling,
    allow: Allow = allow_all,
    fuse: bool | None = None,
) -> Program:
    """The Program for the bands of a format. `fuse`: a network that fits the chip as one call;
    None: as fused.suits says.

    Raises:
        InvalidArgument: a band does not fit the device's largest binding or grid.
    """
    return Lowering(networks, device, fmt, tiling, allow, fuse).program()


@dataclass(frozen=True)
class Run:
    """A network over a slice's tiles of one plane, or of one component of a plane of pairs.

    `tiling`: of that plane, in its own samples. `scratch`: begins the names of its buffers.
    """

    graph: Graph
    tiling: Tiling
    plane: int = 0
    step: int = 1
    component: int = 0
    scratch: str = "luma"


class Lowering:
    """A Program in the making: buffers by name, and calls that fit the device."""

    def __init__(
        self,
        networks: Networks,
        device: DeviceInfo,
        fmt: FrameFormat,
        tiling: Tiling,
        allow: Allow,
        fuse: bool | None = None,
    ) -> None:
        self.networks, self.device, self.allow = networks, device, allow
        self.fuse = fused.suits(device) if fuse is None else fuse
        self.fmt, self.tiling, self.scale = fmt, tiling, networks.scale
        self.in_words = [p.stride // 4 for p in fmt.planes()]
        self.out_words = [p.stride // 4 for p in fmt.scaled(self.scale).planes()]
        self._buffers = {"params": Buffer("params", 4 * PARAM_WORDS, "params")}

    def program(self) -> Program:
        tiles: list[Call] = []
        planes: list[Call] = []
        for i, role in enumerate(self.fmt.roles):
            rows, reach = band_rows(role, self.tiling), self.networks.reach(role)
            self.buffer(f"in{i}", (rows + 2 * reach) * 4 * self.in_words[i], "input")
            self.buffer(f"out{i}", self.scale * rows * 4 * self.out_words[i], "output")
        for i, role in enumerate(self.fmt.roles):
            if role == "y":
                tiles += network_calls(self, Run(self.networks.luma, self.tiling))
            elif self.networks.guided(role):
                tiles += self._guided(i, role)
            else:
                planes.append(self._filter_out(i, role))
        sequences = {"tiles": tuple(tiles)} | ({"planes": tuple(planes)} if planes else {})
        program = Program(self._buffers, sequences, {"tiles": self.tiling.tiles})
        program.check()
        return program

    def buffer(self, name: str, nbytes: int, kind: Any) -> Binding:
        """A buffer, made where there is none of that name.

        Raises:
            InvalidArgument: the device cannot bind so much.
        """
        if name not in self._buffers:
            if nbytes > self.device.limits.max_storage_range:
                raise InvalidArgument(
                    f"A band of {nbytes >> 20} MiB does not fit the device's largest binding of"
                    f" {self.device.limits.max_storage_range >> 20} MiB: ask for smaller tiles."
                )
            self._buffers[name] = Buffer(name, nbytes, kind)
        return Binding(name)

    def weight(self, name: str) -> Binding:
        """A blob of the model."""
        return self.buffer(name, self.networks.blob_bytes[name], "weight")

    def call(self, op: str, fmt: str | None, push: dict[str, Any], *bindings: Binding) -> Call:
        """A call of the variant for `fmt` (variants.choose) that serves a slice of tiles.

        Raises:
            NoKernel: the device has none.
            InvalidArgument: it needs more workgroups than the device has.
        """
        contract = contract_of(op)
        variant = choose(contract, self.device, fmt, self.allow, push)
        most = self.device.limits.max_workgroup_count
        groups = contract.groups({**push, "tokens": self.tiling.batch, "most": most}, variant)
        if any(g > m for g, m in zip(groups, most, strict=True)):
            raise InvalidArgument(
                f"The operation {op} needs {groups} workgroups, the device has {most}."
            )
        return Call(op, variant.name, bindings, contract.pack(**push), groups)

    def _guided(self, plane: int, role: str) -> list[Call]:
        graph = self.networks.chroma[self.fmt.siting]
        tiling = self.tiling.halved(int(graph.attrs["halo"]), int(graph.attrs["widest"]))
        step = 2 if role == "pairs" else 1
        return [
            call
            for component in range(step)
            for call in network_calls(self, Run(graph, tiling, plane, step, component, "chroma"))
        ]

    def _filter_out(self, i: int, role: str) -> Call:
        siting = {"alpha": "plain", "full": "centre"}.get(role, self.fmt.siting)
        push = {
            "bits": self.fmt.depth,
            "step": 2 if role == "pairs" else 1,
            "scale": self.scale,
            "stride": self.in_words[i],
            "out_stride": self.out_words[i],
            "rows": band_rows(role, self.tiling),
            "words": self.out_words[i],
        }
        filters = self.weight(f"chroma.{siting}")
        return self.call("filter_out", None, push, Binding(f"in{i}"), filters, Binding(f"out{i}"))


def network_calls(low: Lowering, run: Run) -> list[Call]:
    """The calls of a network, from the planes of the band to its enlarged plane."""
    return fused.calls(low, run) or Layers(low, run).calls()


class Layers:
    """A network as one call a layer; activations go through scratch buffers [row][channel][x]."""

    def __init__(self, low: Lowering, run: Run) -> None:
        self._low, self._run = low, run
        self._inputs = int(run.graph.attrs["inputs"])
        self._convs = convolutions(run.graph)
        self._where: dict[str, Binding] = {}  # value -> buffer
        self._free: list[Binding] = []
        self._made = 0

    def calls(self) -> list[Call]:
        nodes = self._run.graph.nodes
        last = {value: i for i, node in enumerate(nodes) for value in node.inputs}
        found = []
        for i, node in enumerate(nodes):
            found.append(getattr(self, f"_{node.op}")(node))
            # A buffer is free again after the last reader of what lies in it.
            for value in dict.fromkeys(node.inputs):
                done = last[value] == i and value.startswith(("maps", "sum"))
                if done and self._where[value] != self._where.get(node.output):
                    self._free.append(self._where[value])
        return found

    def _maps(self, value: str) -> Binding:
        if not self._free:
            t = self._run.tiling
            name = f"{self._run.scratch}.maps{self._made}"
            self._free.append(self._low.buffer(name, t.nbytes(t.channels), "scratch"))
            self._made += 1
        self._where[value] = self._free.pop()
        return self._where[value]

    def _samples(self, node: Node) -> tuple[Binding, dict[str, Any]]:
        """The buffer for the samples as floats, and what both operations that fill it are told."""
        t, bits = self._run.tiling, self._low.fmt.depth
        out = self._low.buffer(self._run.scratch, t.nbytes(self._inputs), "scratch")
        self._where[node.output] = out
        push = {
            "bits": bits,
            "stride": self._low.in_words[self._run.plane],
            "tw": t.tw,
            "th": t.th,
            "halo": t.halo,
            "xs": t.xs,
            "y_tile": t.floats(self._inputs),
            "scale": 1 / ((1 << bits) - 1),
        }
        return out, push

    def _luma_in(self, node: Node) -> Call:
        out, push = self._samples(node)
        return self._low.call("luma_in", None, push, Binding("in0"), out)

    def _chroma_in(self, node: Node) -> Call:
        out, push = self._samples(node)
        push |= {
            "step": self._run.step,
            "component": self._run.component,
            "luma_stride": self._low.in_words[0],
        }
        source = Binding(f"in{self._run.plane}")
        return self._low.call("chroma_in", None, push, source, Binding("in0"), out)

    def _conv3x3(self, node: Node) -> Call:
        t = self._run.tiling
        x, cin, cout = self._where[node.inputs[0]], node.int("cin"), node.int("cout")
        index = node.int("index")
        push = {
            "cin": cin,
            "cout": cout,
            "rows": t.window_rows - 2 * (index + 1),
            "xs": t.xs,
            "x_tile": t.floats(self._inputs if index == 0 else t.channels),
            "y_tile": t.floats(t.channels),
        }
        op, fmt = "conv3x3", conv3x3.variant_for(cout)
        if t.spread and winograd.suits(cin, cout):
            op, fmt = "conv3x3_winograd", "cpu"
            push["cols"] = winograd.needed(self._convs, t.tw)[index + 1]
        weights = self._low.weight(node.weights[0])
        return self._low.call(op, fmt, push, x, weights, self._maps(node.output))

    def _skip_add(self, node: Node) -> Call:
        t = self._run.tiling
        y, kept = (self._where[value] for value in node.inputs)
        self._where[node.output] = y
        push = {
            "channels": node.int("channels"),
            "rows": t.window_rows - 2 * (node.int("index") + 1),
            "offset": node.int("offset"),
            "xs": t.xs,
            "tile": t.floats(t.channels),
        }
        return self._low.call("skip_add", None, push, kept, self._low.weight(node.weights[0]), y)

    def _shuffle_out(self, node: Node) -> Call:
        t, run = self._run.tiling, self._run
        push = {
            "bits": self._low.fmt.depth,
            "scale": self._low.scale,
            "step": run.step,
            "component": run.component,
            "plane": video.C_WIDTH if run.plane else video.WIDTH,
            "stride": self._low.out_words[run.plane],
            "tw": t.tw,
            "th": t.th,
            "halo": t.halo,
            "xs": t.xs,
            "x_row": self._inputs * t.xs,
            "f_tile": t.floats(t.channels),
            "x_tile": t.floats(self._inputs),
        }
        f, x = (self._where[value] for value in node.inputs)
        base, out = self._low.weight(node.weights[0]), Binding(f"out{run.plane}")
        return self._low.call("shuffle_out", f"x{self._low.scale}", push, f, x, base, out)


def band_rows(role: str, tiling: Tiling) -> int:
    """Rows of a band in a plane."""
    return tiling.th // 2 if role in ("half", "pairs") else tiling.th
