# SPDX-License-Identifier: Apache-2.0
"""A video model: its file, its Graph, and the Program that enlarges the bands of a format.

File (.pvrm): metadata {kind "video", arch "nsr", name, scale 2, channels, blocks, licence}; blobs
conv0.. (f32: weights [cin][9][cout], bias, slope), base [4][25], chroma.left, chroma.centre,
chroma.plain [4][25] (phase = 2 * row parity + column parity).

Graph: values y, chroma.N (planes of the frame) -> luma_in -> conv3x3 ... -> shuffle_out; chroma_x2
for each other plane.

Program: `in0`.. (input) a band of each plane as it lies in the frame, `luma`, `maps.N` (scratch),
`out0`.. (output) the enlarged band; sequences `luma` (a slice's tiles) and `chroma` (the band's
other planes, where there are any).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from engine.backends.base import Backend, DeviceInfo
from engine.errors import BadModel, InvalidArgument, UnsupportedModel
from engine.graph import Graph, Node, Weight
from engine.lower import Allow, allow_all, choose
from engine.program import Binding, Buffer, Call, Program
from engine.pvrm import Pvrm
from engine.video.frames import FrameFormat
from engine.video.tiles import Tiling
from kernels import op as contract_of
from kernels.contract import PARAM_WORDS

SCALE = 2
FILTER_REACH = 2  # rows that a chroma filter reads above and below
_FILTER_BYTES = 4 * 100
MAX_CHANNELS, MAX_BLOCKS = 64, 30


def build_graph(channels: int, blocks: int) -> Graph:
    """The luma network: luma_in, one convolution in, `blocks` between, one out, shuffle_out."""
    nodes = [Node("luma", "luma_in", ("y",), "luma")]
    weights: dict[str, Weight] = {}
    sizes = [1] + [channels] * (blocks + 1) + [SCALE * SCALE]
    value = "luma"
    for i, (cin, cout) in enumerate(pairwise(sizes)):
        name = f"conv{i}"
        weights[name] = Weight(name, (1, conv_words(cin, cout)), "F32", format="f32")
        attrs = {"cin": cin, "cout": cout}
        nodes.append(Node(name, "conv3x3", (value,), f"maps.{i}", (name,), attrs))
        value = f"maps.{i}"
    weights["base"] = Weight("base", (1, 100), "F32", format="f32")
    nodes.append(Node("shuffle", "shuffle_out", (value, "luma"), "out", ("base",)))
    attrs = {"channels": channels, "blocks": blocks, "halo": blocks + 2}
    return Graph(tuple(nodes), weights, attrs)


def conv_words(cin: int, cout: int) -> int:
    """Floats of a convolution's blob."""
    return cin * 9 * cout + 2 * cout


class VideoModel:
    """A model on a device, shared by its sessions."""

    def __init__(self, file: Pvrm, backend: Backend) -> None:
        """Raises:
        BadModel, UnsupportedModel: as `inspect`.
        """
        self.info = _describe(file)
        self.backend = backend
        self.graph = build_graph(int(self.info["channels"]), int(self.info["blocks"]))
        blobs: dict[str, Any] = {}
        for name, weight in self.graph.weights.items():
            blobs[name] = _floats(file, name, weight.shape[1])
        for name in ("chroma.left", "chroma.centre", "chroma.plain"):
            blobs[name] = _floats(file, name, 100)
        self.blob_bytes = {name: int(blob.nbytes) for name, blob in blobs.items()}
        self.weights = backend.weights(blobs)
        self.info["nbytes"] = self.weights.nbytes()

    @classmethod
    def load(
        cls, source: int | str, backend: Backend, progress: Callable[[float], None] | None = None
    ) -> VideoModel:
        """Opens a model file by descriptor (which stays the caller's) or path.

        Raises:
            BadModel, UnsupportedModel
        """
        model = cls(Pvrm.open(source, verify=True), backend)
        if progress:
            progress(1.0)
        return model

    @property
    def halo(self) -> int:
        """Samples around a tile that its result depends on: the network's radius."""
        return int(self.graph.attrs["halo"])

    @property
    def channels(self) -> int:
        return int(self.info["channels"])

    @property
    def scale(self) -> int:
        return int(self.info["scale"])

    def close(self) -> None:
        self.weights.close()


def inspect(source: int | str) -> dict[str, Any]:
    """What a file is as a video model: arch, name, scale, channels, blocks, licence, format,
    nbytes. Checks every blob.

    Raises:
        BadModel, UnsupportedModel
    """
    return _describe(Pvrm.open(source, verify=True))


def _describe(file: Pvrm) -> dict[str, Any]:
    m = file.metadata
    if m.get("kind") != "video" or m.get("arch") != "nsr":
        raise UnsupportedModel("The file is no video model of the nsr family.")
    scale, channels, blocks = (m.get(k) for k in ("scale", "channels", "blocks"))
    if not (isinstance(scale, int) and isinstance(channels, int) and isinstance(blocks, int)):
        raise BadModel("The video model does not say its sizes.")
    if scale != SCALE:
        raise UnsupportedModel(f"The video model enlarges x{scale}; x{SCALE} is what pvrd runs.")
    if not (8 <= channels <= MAX_CHANNELS and channels % 8 == 0 and 0 <= blocks <= MAX_BLOCKS):
        raise UnsupportedModel(f"A network of {blocks} blocks of {channels} channels is not run.")
    nbytes = sum(e.nbytes for e in file.entries.values())
    return {
        "kind": "video",
        "arch": "nsr",
        "name": str(m.get("name", "")),
        "scale": scale,
        "channels": channels,
        "blocks": blocks,
        "format": "f32",
        "licence": str(m.get("licence", "")),
        "nbytes": nbytes,
    }


def _floats(file: Pvrm, name: str, count: int) -> Any:
    blob = file.blob(name)
    if blob.nbytes != 4 * count:
        raise BadModel(f"The video model's {name} has {blob.nbytes} bytes, not {4 * count}.")
    if not np.isfinite(blob.view("<f4")).all():
        raise BadModel(f"The video model's {name} has numbers that are not finite.")
    return blob


def lower(
    graph: Graph,
    blob_bytes: dict[str, int],
    device: DeviceInfo,
    fmt: FrameFormat,
    tiling: Tiling,
    allow: Allow = allow_all,
) -> Program:
    """The Program for the bands of a format.

    Raises:
        InvalidArgument: a band does not fit the device's largest binding or grid.
    """
    return _Lowering(graph, blob_bytes, device, fmt, tiling, allow).program()


class _Lowering:
    def __init__(
        self,
        graph: Graph,
        blob_bytes: dict[str, int],
        device: DeviceInfo,
        fmt: FrameFormat,
        tiling: Tiling,
        allow: Allow,
    ) -> None:
        self.allow = allow
        self.graph, self.device, self.fmt, self.tiling = graph, device, fmt, tiling
        self.blob_bytes = blob_bytes
        self.buffers = {"params": Buffer("params", 4 * PARAM_WORDS, "params")}
        self.channels = {"luma": 1}

    def program(self) -> Program:
        planes, wide = self.fmt.planes(), self.fmt.scaled(SCALE).planes()
        self.in_words = [p.stride // 4 for p in planes]
        self.out_words = [p.stride // 4 for p in wide]
        for i, role in enumerate(self.fmt.roles):
            rows, reach = band_rows(role, self.tiling)
            self._buffer(f"in{i}", (rows + 2 * reach) * planes[i].stride, "input")
            self._buffer(f"out{i}", SCALE * rows * wide[i].stride, "output")
        luma = tuple(getattr(self, f"_{node.op}")(node) for node in self.graph.nodes)
        chroma = tuple(
            self._chroma_x2(i, role) for i, role in enumerate(self.fmt.roles) if role != "y"
        )
        sequences = {"luma": luma} | ({"chroma": chroma} if chroma else {})
        program = Program(self.buffers, sequences, {"tiles": self.tiling.tiles})
        program.check()
        return program

    def _buffer(self, name: str, nbytes: int, kind: Any) -> Binding:
        if name not in self.buffers:
            if nbytes > self.device.limits.max_storage_range:
                raise InvalidArgument(
                    f"A band of {nbytes >> 20} MiB does not fit the device's largest binding of"
                    f" {self.device.limits.max_storage_range >> 20} MiB: ask for smaller tiles."
                )
            self.buffers[name] = Buffer(name, nbytes, kind)
        return Binding(name)

    def _weight(self, name: str) -> Binding:
        return self._buffer(name, self.blob_bytes[name], "weight")

    def _call(self, name: str, push: dict[str, Any], *bindings: Binding) -> Call:
        contract = contract_of(name)
        fmt = None
        if name == "conv3x3":
            fmt = "oc8" if push["cout"] % 8 == 0 else "oc4"
        variant = choose(contract, self.device, fmt, self.allow)
        most = self.device.limits.max_workgroup_count
        groups = contract.groups({**push, "tokens": self.tiling.batch, "most": most}, variant)
        if any(g > m for g, m in zip(groups, most, strict=True)):
            raise InvalidArgument(
                f"The operation {name} needs {groups} workgroups, the device has {most}."
            )
        return Call(name, variant.name, bindings, contract.pack(**push), groups)

    def _luma_in(self, node: Node) -> Call:
        t = self.tiling
        out = self._buffer("luma", t.nbytes(1), "scratch")
        push = {
            "bits": self.fmt.depth,
            "stride": self.in_words[0],
            "tw": t.tw,
            "th": t.th,
            "halo": t.halo,
            "xs": t.xs,
            "y_tile": t.floats(1),
            "scale": 1 / ((1 << self.fmt.depth) - 1),
        }
        return self._call("luma_in", push, Binding("in0"), out)

    def _conv3x3(self, node: Node) -> Call:
        t = self.tiling
        source = node.inputs[0]
        cin, cout = node.int("cin"), node.int("cout")
        self.channels[node.output] = cout
        done = int(node.name.removeprefix("conv")) + 1
        # Two buffers by turns: a layer reads the one and writes the other.
        x = Binding("luma") if source == "luma" else Binding(f"maps{done % 2}")
        y = self._buffer(f"maps{(done + 1) % 2}", t.nbytes(self.tiling.channels), "scratch")
        push = {
            "cin": cin,
            "cout": cout,
            "rows": t.window_rows - 2 * done,
            "xs": t.xs,
            "x_tile": t.floats(1) if source == "luma" else t.floats(t.channels),
            "y_tile": t.floats(t.channels),
        }
        self.last = y
        return self._call("conv3x3", push, x, self._weight(node.weights[0]), y)

    def _shuffle_out(self, node: Node) -> Call:
        t = self.tiling
        push = {
            "bits": self.fmt.depth,
            "stride": self.out_words[0],
            "tw": t.tw,
            "th": t.th,
            "halo": t.halo,
            "xs": t.xs,
            "f_tile": t.floats(t.channels),
            "luma_tile": t.floats(1),
        }
        base = self._weight("base")
        return self._call("shuffle_out", push, self.last, Binding("luma"), base, Binding("out0"))

    def _chroma_x2(self, i: int, role: str) -> Call:
        rows, _ = band_rows(role, self.tiling)
        if role == "alpha":
            name = "chroma.plain"
        elif role == "full":
            name = "chroma.centre"
        else:
            name = f"chroma.{self.fmt.siting}"
        push = {
            "bits": self.fmt.depth,
            "step": 2 if role == "pairs" else 1,
            "stride": self.in_words[i],
            "out_stride": self.out_words[i],
            "rows": rows,
            "words": self.out_words[i],
        }
        filters = self._weight(name)
        return self._call("chroma_x2", push, Binding(f"in{i}"), filters, Binding(f"out{i}"))


def band_rows(role: str, tiling: Tiling) -> tuple[int, int]:
    """Rows of a band in a plane, and rows beyond them on each side that the filters read."""
    if role == "y":
        return tiling.th, tiling.halo
    return (tiling.th // 2 if role in ("half", "pairs") else tiling.th), FILTER_REACH
