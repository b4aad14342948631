# SPDX-License-Identifier: Apache-2.0
"""A video model: its file and its Graphs.

File (.pvrm): metadata {kind "video", arch "nsr", name, scale 2-4, channels, blocks, [skips],
[chroma {channels, blocks}], [int8], licence} and blobs of f32 (int8: the luma network is meant for
CPUs that multiply bytes; the share of the calibrated ranges that bytes span):

- conv0 .. conv<blocks + 1>: weights [cin][9][cout], bias, slope (of the PReLU; 1: none). The last
  has `maps(scale)` outputs: scale^2 phases (phase = scale * row + column), zeros behind them.
- base [scale^2][25]: a 5x5 filter of the luma for each phase, added to the last convolution's.
- skip<b> [channels]: for each pair (a, b) of `skips` what conv<a> gave is added, cropped to the
  middle, to what conv<b> gives; the slope of the sum's PReLU is here, and 1 in conv<b>.
- chroma.left, chroma.centre, chroma.plain [scale^2][25]: filters of a plane alone.
- with `chroma`, chroma.left.conv0 .. and chroma.left.base, the same for centre: a network like the
  luma's, at the resolution of 4:2:0 chroma, that sees the chroma sample and the four luma samples
  around it. Without it the filters alone enlarge chroma, as they always do for 4:4:4 and alpha.

Graph: y -> luma_in -> conv3x3 ... (skip_add) -> shuffle_out; for chroma the same from chroma_in
on. engine/video/lowering.py makes the Program of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from engine.backends.base import Backend, DeviceInfo
from engine.errors import BadModel, UnsupportedModel
from engine.graph import Graph, Node, Weight
from engine.pvrm import Pvrm
from engine.video import fused
from kernels.contract import ceil_div
from kernels.conv3x3_winograd import op as winograd

SCALES = (2, 3, 4)
SITINGS = ("left", "centre")
FILTER_REACH = 2  # samples around one that a 5x5 filter reads
CHROMA_INPUTS = 5  # the chroma sample and four of luma
MAX_CHANNELS, MAX_BLOCKS = 64, 30


def maps(scale: int) -> int:
    """Outputs of a network's last convolution: scale^2 phases, filled up to a multiple of 4."""
    return ceil_div(scale * scale, 4) * 4


def conv_words(cin: int, cout: int) -> int:
    """Floats of a convolution's blob."""
    return cin * 9 * cout + 2 * cout


@dataclass(frozen=True)
class Shape:
    """The sizes of a network: inputs -> channels, `blocks` times channels -> channels, channels ->
    maps(scale), all 3x3. `skips`: pairs of convolutions, the second adds what the first gave.
    """

    inputs: int
    channels: int
    blocks: int
    scale: int
    skips: tuple[tuple[int, int], ...] = ()

    @property
    def convs(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each convolution."""
        hidden = [self.channels] * (self.blocks + 1)
        return list(pairwise([self.inputs, *hidden, maps(self.scale)]))

    @property
    def halo(self) -> int:
        """Samples around one that its result depends on: each convolution reaches one further."""
        return self.blocks + 2


def build_graph(shape: Shape, prefix: str = "") -> Graph:
    """The Graph of a network, its weights' names behind `prefix`. Attributes: those of the shape,
    `halo`, `widest` (channels of the widest value).
    """
    entry = ("luma_in", ("y",)) if shape.inputs == 1 else ("chroma_in", ("c", "y"))
    nodes = [Node("in", entry[0], entry[1], "samples")]
    weights: dict[str, Weight] = {}
    sources = {b: a for a, b in shape.skips}

    def weight(name: str, words: int) -> tuple[str, ...]:
        weights[prefix + name] = Weight(prefix + name, (1, words), "F32", format="f32")
        return (prefix + name,)

    values = ["samples"]  # what each convolution reads; the next one is its result
    for i, (cin, cout) in enumerate(shape.convs):
        attrs = {"cin": cin, "cout": cout, "index": i}
        blob = weight(f"conv{i}", conv_words(cin, cout))
        nodes.append(Node(f"conv{i}", "conv3x3", (values[i],), f"maps.{i}", blob, attrs))
        values.append(f"maps.{i}")
        if i in sources:
            inputs = (values[i + 1], values[sources[i] + 1])
            attrs = {"channels": cout, "offset": i - sources[i], "index": i}
            blob = weight(f"skip{i}", cout)
            nodes.append(Node(f"skip{i}", "skip_add", inputs, f"sum.{i}", blob, attrs))
            values[i + 1] = f"sum.{i}"
    base = weight("base", 25 * shape.scale**2)
    nodes.append(Node("out", "shuffle_out", (values[-1], "samples"), "out", base))
    attrs = {
        "inputs": shape.inputs,
        "channels": shape.channels,
        "blocks": shape.blocks,
        "scale": shape.scale,
        "halo": shape.halo,
        "widest": max(shape.inputs, shape.channels, maps(shape.scale)),
    }
    return Graph(tuple(nodes), weights, attrs)


def convolutions(graph: Graph) -> list[tuple[int, int]]:
    """(inputs, outputs) of each convolution of a network."""
    return [(n.int("cin"), n.int("cout")) for n in graph.nodes if n.op == "conv3x3"]


@dataclass(frozen=True)
class Networks:
    """What a model computes. `chroma` has a Graph for each siting, or nothing: then the learned
    filters do chroma alone. `blob_bytes`: of each weight.
    """

    luma: Graph
    chroma: Mapping[str, Graph]
    blob_bytes: Mapping[str, int]

    @property
    def scale(self) -> int:
        return int(self.luma.attrs["scale"])

    @property
    def halo(self) -> int:
        """Samples around a luma tile that its result depends on."""
        return int(self.luma.attrs["halo"])

    @property
    def widest(self) -> int:
        """Channels of the widest value of the luma network."""
        return int(self.luma.attrs["widest"])

    def spread(self, device: DeviceInfo) -> int:
        """Columns beyond the halo that luma's windows have on a device: on a CPU those that wide
        layers give in groups (kernels/conv3x3_winograd).
        """
        convs = convolutions(self.luma)
        if device.kind != "cpu":
            return 0
        return winograd.needed(convs, 0)[0] - 2 * self.halo

    def guided(self, role: str) -> bool:
        """Does the chroma network, which sees the luma, enlarge such a plane?"""
        return bool(self.chroma) and role in ("half", "pairs")

    def reach(self, role: str) -> int:
        """Rows beyond a band, on each side, that the band's result depends on in such a plane."""
        network = next(iter(self.chroma.values()), None)
        halo = int(network.attrs["halo"]) if network else FILTER_REACH
        if role == "y":
            return max(self.halo, 2 * halo)
        return halo if self.guided(role) else FILTER_REACH


class VideoModel:
    """A model on a device, shared by its sessions."""

    def __init__(self, file: Pvrm, backend: Backend, precision: str = "f32") -> None:
        """precision: of the luma network, "f32" or "int8". `info["format"]` says which it is, and
        `info["why_f32"]` why it is not int8 where that was asked for.

        Raises:
            BadModel, UnsupportedModel: as `inspect`.
        """
        self.info, shape, chroma = describe(file)
        self.file, self.backend = file, backend
        luma = build_graph(shape)
        guided = {s: build_graph(chroma, f"chroma.{s}.") for s in SITINGS} if chroma else {}
        sizes = {f"chroma.{name}": 25 * shape.scale**2 for name in (*SITINGS, "plain")}
        for graph in (luma, *guided.values()):
            sizes |= {name: weight.shape[1] for name, weight in graph.weights.items()}
        blobs = {name: floats(file, name, count) for name, count in sizes.items()}
        if precision == "int8" and (why := fused.why_not_int8(luma, backend.info)):
            self.info["why_f32"], precision = why, "f32"
        self.info["format"] = precision
        share = float(self.info["int8"]) or 1.0
        blobs |= fused.weights(luma, blobs, precision, share)
        for graph in guided.values():
            blobs |= fused.chroma_weights(graph, blobs, backend.info)
        self.networks = Networks(luma, guided, {n: int(b.nbytes) for n, b in blobs.items()})
        self.weights = backend.weights(blobs)
        self.info["nbytes"] = self.weights.nbytes()
        self._bytes: VideoModel | None = None
        self.int8_faster: bool | None = None  # once it was tried

    @classmethod
    def load(
        cls,
        source: int | str,
        backend: Backend,
        progress: Callable[[float], None] | None = None,
        precision: str = "f32",
    ) -> VideoModel:
        """Opens a model file by descriptor (which stays the caller's) or path.

        Raises:
            BadModel, UnsupportedModel
        """
        model = cls(Pvrm.open(source, verify=True), backend, precision)
        if progress:
            progress(1.0)
        return model

    @property
    def scale(self) -> int:
        return self.networks.scale

    def int8(self) -> VideoModel:
        """The same model in int8, this one's to close. Where it stays in float32, this one, and
        `info["why_f32"]` says why.
        """
        if self._bytes is None and "why_f32" not in self.info:
            made = VideoModel(self.file, self.backend, "int8")
            if made.info["format"] == "int8":
                self._bytes = made
            else:
                self.info["why_f32"] = made.info["why_f32"]
                made.close()
        return self._bytes or self

    def close(self) -> None:
        if self._bytes is not None:
            self._bytes.close()
        self.weights.close()


def inspect(source: int | str) -> dict[str, Any]:
    """What a file is as a video model: arch, name, scale, channels, blocks, licence, format, int8
    (0: in float32 unless somebody asks), nbytes. Checks every blob.

    Raises:
        BadModel, UnsupportedModel
    """
    return describe(Pvrm.open(source, verify=True))[0]


def describe(file: Pvrm) -> tuple[dict[str, Any], Shape, Shape | None]:
    """The description of a model for users, and the shapes of its luma and chroma networks."""
    m = file.metadata
    if m.get("kind") != "video" or m.get("arch") != "nsr":
        raise UnsupportedModel("The file is no video model of the nsr family.")
    scale = m.get("scale")
    if not isinstance(scale, int):
        raise BadModel("The video model does not say its scale.")
    if scale not in SCALES:
        raise UnsupportedModel(f"The video model enlarges x{scale}; pvrd runs x2, x3 and x4.")
    luma = _shape(m, 1, scale)
    chroma = m.get("chroma")
    if chroma is not None and not isinstance(chroma, dict):
        raise BadModel("The video model's chroma network is not understood.")
    info = {
        "kind": "video",
        "arch": "nsr",
        "name": str(m.get("name", "")),
        "scale": scale,
        "channels": luma.channels,
        "blocks": luma.blocks,
        "format": "f32",
        "int8": _share(m),
        "licence": str(m.get("licence", "")),
        "nbytes": sum(e.nbytes for e in file.entries.values()),
    }
    return info, luma, _shape(chroma, CHROMA_INPUTS, scale) if chroma else None


def _share(m: Mapping[str, Any]) -> float:
    share = m.get("int8", 0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise BadModel("The video model's share of ranges in int8 is none.")
    return float(share)


def _shape(m: Mapping[str, Any], inputs: int, scale: int) -> Shape:
    channels, blocks, skips = m.get("channels"), m.get("blocks"), m.get("skips", [])
    if not (isinstance(channels, int) and isinstance(blocks, int)):
        raise BadModel("The video model does not say its sizes.")
    if not (8 <= channels <= MAX_CHANNELS and channels % 8 == 0 and 0 <= blocks <= MAX_BLOCKS):
        raise UnsupportedModel(f"A network of {blocks} blocks of {channels} channels is not run.")
    try:
        pairs = tuple((int(a), int(b)) for a, b in skips)
    except (TypeError, ValueError, OverflowError):
        raise BadModel("The video model's skips are not understood.") from None
    inner = all(0 <= a < b <= blocks for a, b in pairs)  # the last convolution has other channels
    if not inner or len({b for _, b in pairs}) < len(pairs):
        raise BadModel("The video model's skips do not fit its convolutions.")
    return Shape(inputs, channels, blocks, scale, pairs)


def floats(file: Pvrm, name: str, count: int) -> Any:
    """A blob of so many f32, as the bytes that they are.

    Raises:
        BadModel: it has other ones, or numbers that are not finite.
    """
    blob = file.blob(name)
    if blob.nbytes != 4 * count:
        raise BadModel(f"The video model's {name} has {blob.nbytes} bytes, not {4 * count}.")
    if not np.isfinite(blob.view("<f4")).all():
        raise BadModel(f"The video model's {name} has numbers that are not finite.")
    return blob
