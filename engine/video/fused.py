# SPDX-License-Identifier: Apache-2.0
"""A luma network as one call (kernels/nsr) where its shape allows it: nothing between its layers
leaves the chip.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.backends.base import DeviceInfo
from engine.graph import Graph
from engine.program import Binding, Call
from kernels import op as contract_of
from kernels.nsr import op as nsr

if TYPE_CHECKING:
    from engine.video.lowering import Lowering, Run

BLOB = "nsr"  # the network's weights in the form of that kernel


def fits(graph: Graph) -> bool:
    """Can the kernel run a network? Then each of its variants for so many channels can."""
    convs = [node for node in graph.nodes if node.op == "conv3x3"]
    plain = len(graph.nodes) == len(convs) + 2 and graph.nodes[0].op == "luma_in"
    channels, scale = int(graph.attrs["channels"]), int(graph.attrs["scale"])
    mine = [v for v in contract_of("nsr").variants if v.defines["CHANNELS"] == str(channels)]
    return plain and bool(mine) and all(nsr.fits(v, len(convs), scale) for v in mine)


def weights(graph: Graph, blobs: Mapping[str, Any]) -> dict[str, Any]:
    """The blobs that the kernel needs beside those of the file; none where it does not fit."""
    if not fits(graph):
        return {}
    phases = int(graph.attrs["scale"]) ** 2
    layers: list[nsr.Layer] = []
    for node in graph.nodes[1:-1]:
        cin, cout = node.int("cin"), node.int("cout")
        flat = np.asarray(blobs[node.weights[0]]).view("<f4").astype(np.float32)
        taps = flat[: 9 * cin * cout].reshape(cin, 3, 3, cout)
        bias, slope = flat[9 * cin * cout :].reshape(2, cout)
        layers.append((taps, bias, slope))
    taps, bias, slope = layers[-1]  # filled up with zeros
    layers[-1] = taps[..., :phases], bias[:phases], slope[:phases]
    base = np.asarray(blobs[graph.nodes[-1].weights[0]]).view("<f4").reshape(phases, 5, 5)
    return {BLOB: nsr.pack(layers, base).view(np.uint8)}


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
    if not low.fuse or not fits(run.graph):
        return None
    t, channels = run.tiling, int(run.graph.attrs["channels"])
    push = {
        "bits": low.fmt.depth,
        "stride": low.in_words[run.plane],
        "out_stride": low.out_words[run.plane],
        "tw": t.tw,
        "th": t.th,
        "channels": channels,
        "layers": t.halo,
        "scale": low.scale,
    }
    source, target = Binding(f"in{run.plane}"), Binding(f"out{run.plane}")
    name = nsr.variant_for(channels)
    return [low.call("nsr", name, push, source, low.weight(BLOB), target)]
