# SPDX-License-Identifier: Apache-2.0
"""A network as one call where its shape allows it: nothing between its layers leaves the chip. Luma
by kernels/nsr and kernels/nsr_int8; chroma, on the CPU, by kernels/nsr_chroma.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.backends import cpu
from engine.backends.base import DeviceInfo
from engine.graph import Graph
from engine.program import Binding, Call
from engine.video import calibrate
from kernels import op as contract_of
from kernels.nsr import op as nsr
from kernels.nsr_int8 import op as nsr_int8
from kernels.nsr_int8.op import Skips

if TYPE_CHECKING:
    from engine.video.lowering import Lowering, Run

# The network's weights in the form of these kernels; a model has at most one of them.
FLOATS, BYTES = "nsr", "nsr_int8"
CHROMA = "nsr_chroma"  # begins the names of those of the chroma networks
# Bytes cost networks of up to so many layers at most 0.05 dB (Set5, Set14), one of 13 layers 0.13.
INT8_LAYERS = 8


def fits(graph: Graph) -> bool:
    """Can the kernel run a network? Then each of its variants for so many channels can."""
    convs = [node for node in graph.nodes if node.op == "conv3x3"]
    plain = len(graph.nodes) == len(convs) + 2 and graph.nodes[0].op == "luma_in"
    channels, scale = int(graph.attrs["channels"]), int(graph.attrs["scale"])
    mine = [v for v in contract_of("nsr").variants if v.defines["CHANNELS"] == str(channels)]
    return plain and bool(mine) and all(nsr.fits(v, len(convs), scale) for v in mine)


def why_not_int8(graph: Graph, device: DeviceInfo) -> str:
    """Why a network stays in float32 on a device; "" where it can be done in int8."""
    if device.kind != "cpu":
        return "no kernel of a GPU computes in int8"
    layers = int(graph.attrs["halo"])
    if layers > INT8_LAYERS:
        return f"in int8 a network of {layers} layers loses more than 0.1 dB"
    return ""


def weights(
    graph: Graph, blobs: Mapping[str, Any], precision: str = "f32", share: float = 1.0
) -> dict[str, Any]:
    """The blob that the kernel needs beside those of the file; none where it does not fit.
    precision: "int8" only where why_not_int8 allows it; share: as calibrate.ranges.
    """
    if precision == "int8":
        layers, base, skips = _network(graph, blobs)
        ranges = calibrate.ranges(layers, skips, share)
        return {BYTES: nsr_int8.pack(layers, base, ranges, skips).view(np.uint8)}
    if not fits(graph):
        return {}
    layers, base, _ = _network(graph, blobs)
    return {FLOATS: nsr.pack(layers, base).view(np.uint8)}


def chroma_weights(
    graph: Graph, blobs: Mapping[str, Any], device: DeviceInfo
) -> dict[str, Any]:
    """The same for a chroma network: its layers' weights and its filters, one after the other."""
    _, *convs, last = graph.nodes
    if device.kind != "cpu" or not cpu.has(CHROMA) or len(convs) < 2:
        return {}
    if any(node.op != "conv3x3" for node in convs):
        return {}
    parts = [np.asarray(blobs[node.weights[0]]).view(np.uint8) for node in (*convs, last)]
    return {f"{CHROMA}.{last.weights[0]}": np.concatenate([p.reshape(-1) for p in parts])}


def _network(graph: Graph, blobs: Mapping[str, Any]) -> tuple[list[nsr.Layer], Any, Skips]:
    def floats(names: Sequence[str]) -> Any:
        return np.asarray(blobs[names[0]]).view("<f4").astype(np.float32)

    phases = int(graph.attrs["scale"]) ** 2
    layers: list[nsr.Layer] = []
    skips: dict[int, tuple[int, Any]] = {}
    for node in graph.nodes[1:-1]:
        flat = floats(node.weights)
        if node.op == "skip_add":
            index = node.int("index")
            skips[index] = index - node.int("offset"), flat
            continue
        cin, cout = node.int("cin"), node.int("cout")
        taps = flat[: 9 * cin * cout].reshape(cin, 3, 3, cout)
        bias, slope = flat[9 * cin * cout :].reshape(2, cout)
        layers.append((taps, bias, slope))
    taps, bias, slope = layers[-1]  # filled up with zeros
    layers[-1] = taps[..., :phases], bias[:phases], slope[:phases]
    return layers, floats(graph.nodes[-1].weights).reshape(phases, 5, 5), skips


def suits(device: DeviceInfo) -> bool:
    """Is a network in one call what a device should get, where nobody says? Not a GPU in software:
    its shared memory is a CPU's, and layers of their own run faster there.
    """
    return device.kind == "cpu" or not device.software


def fuses(graph: Graph, device: DeviceInfo) -> bool:
    """Will a network be one call there, where nobody says?"""
    return suits(device) and fits(graph)


def calls(low: Lowering, run: Run) -> list[Call] | None:
    """The network as one call; None where it has to be one a layer."""
    if not low.fuse:
        return None
    if run.graph is not low.networks.luma:
        return _chroma(low, run)
    known = low.networks.blob_bytes
    name = next((blob for blob in (BYTES, FLOATS) if blob in known), "")
    if not name:
        return None
    source, target = Binding(f"in{run.plane}"), Binding(f"out{run.plane}")
    fmt = nsr.variant_for(int(run.graph.attrs["channels"])) if name == FLOATS else None
    return [low.call(name, fmt, _push(low, run), source, low.weight(name), target)]


def _push(low: Lowering, run: Run) -> dict[str, Any]:
    t, channels = run.tiling, int(run.graph.attrs["channels"])
    return {
        "bits": low.fmt.depth,
        "stride": low.in_words[run.plane],
        "out_stride": low.out_words[run.plane],
        "tw": t.tw,
        "th": t.th,
        "channels": channels,
        "layers": t.halo,
        "scale": low.scale,
    }


def _chroma(low: Lowering, run: Run) -> list[Call] | None:
    """A chroma network as one call; None where it has to be one a layer."""
    name = f"{CHROMA}.{run.graph.nodes[-1].weights[0]}"
    if name not in low.networks.blob_bytes:
        return None
    push = _push(low, run) | {
        "step": run.step,
        "component": run.component,
        "luma_stride": low.in_words[0],
    }
    source, target = Binding(f"in{run.plane}"), Binding(f"out{run.plane}")
    return [low.call("nsr_chroma", None, push, source, Binding("in0"), low.weight(name), target)]
