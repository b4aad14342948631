# SPDX-License-Identifier: Apache-2.0
"""Compiles somebody's network into a model that pvrd runs.

    python -m engine.compile FILE [-o OUT.pvrm] [--weights f16|q8] [--profile NAME] [--name NAME]
        [--licence TEXT] [--explain] [--json]

FILE is a language model: a Hugging Face folder or GGUF (--weights is for its float matrices), or a
network that enlarges pictures: ONNX, ncnn's .param or .bin (the other one beside it), or a
checkpoint (.pth, .safetensors: needs PyTorch and spandrel). What is not run is named with its
node, and nothing is written then. --profile says how the network would run on a device of that
profile. With --json there is one object on standard output, {"error", "message"} where it failed.
Exit status 0; 5: the file is no network that is run; 2: wrong usage; 1: the result cannot be
written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backends import profiles
from engine.backends.base import DeviceInfo
from engine.backends.profiles import Profile
from engine.errors import InvalidArgument, PvrError
from engine.graph import Graph, explain
from engine.importers import convnets
from engine.text import compiled
from engine.video import convnet, convnet_pack
from engine.video.convnet_colour import planes
from engine.video.convnet_graph import Net
from engine.video.convnet_lower import PART_MACS, Plan, lower, plan
from engine.video.convnet_windows import Windows, windows
from engine.video.frames import FrameFormat

OK, FAILED, USAGE, NOT_RUN = 0, 1, 2, 5
FRAME = (960, 540)  # the frame for which --profile says how it would be cut


@dataclass(frozen=True)
class Fit:
    """How frames of FRAME run on a device."""

    profile: str
    tiles: int
    window: tuple[int, int]
    overlap: int
    parts: int
    mebibytes: int


def fit(given: Plan, profile: Profile) -> Fit:
    """How a network runs on the device of a profile.

    Raises:
        InvalidArgument: not at all.
        BadModel: a kernel does not fit the device.
    """
    device = DeviceInfo("gpu", profile.name, "", False, profile.alone(), profile.features)
    cut: Windows = windows(given, *FRAME, device)
    fmt = FrameFormat(*FRAME, "i420")
    shown = planes(fmt, given.scale, given.net.colours)
    program = lower(given, shown, cut.width, cut.height, device, PART_MACS)
    nbytes = sum(b.nbytes for b in program.buffers.values())
    size = (cut.width, cut.height)
    return Fit(profile.name, cut.tiles, size, cut.overlap, int(program.meta["parts"]), nbytes >> 20)


def report(net: Net, source: Path, target: Path, given: Plan) -> dict[str, Any]:
    """What was compiled, as data."""
    return {
        "source": str(source),
        "output": str(target),
        "source_bytes": source.stat().st_size,
        "output_bytes": target.stat().st_size,
        "weights": given.fmt,
        "parameters": sum(int(net.arrays[w].size) for n in net.nodes for w in n.weights),
        "scale": given.scale,
        "colours": given.net.colours,
        "radius": given.radius,
        "multiplications": given.macs,
        "nodes": len(given.net.nodes),
    }


def _said(facts: dict[str, Any]) -> str:
    seen = "red, green, blue" if facts["colours"] == 3 else "luma"
    return (
        f"{facts['output']}: x{facts['scale']} of {seen}, {facts['nodes']} operations,"
        f" {facts['multiplications'] / 1e6:.2f} million multiplications a sample of the input,"
        f" radius {facts['radius']}; weights {facts['weights']},"
        f" {facts['output_bytes'] / 1e6:.2f} MB."
    )


def _said_fit(found: Fit) -> str:
    cut = "whole" if found.tiles == 1 else f"in {found.tiles} tiles"
    return (
        f"{found.profile}: a frame of {FRAME[0]}x{FRAME[1]} {cut}, windows of"
        f" {found.window[0]}x{found.window[1]}, overlap {found.overlap}, {found.parts} parts each,"
        f" {found.mebibytes} MiB."
    )


def main(argv: list[str] | None = None) -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(
        prog="engine.compile", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("-o", "--output", metavar="OUT.pvrm", type=Path)
    parser.add_argument("--weights", choices=convnet_pack.FORMATS, default="f16")
    parser.add_argument("--profile", choices=profiles.names(), metavar="NAME")
    parser.add_argument("--name", help="what the model calls itself (default: the file's name)")
    parser.add_argument("--licence", default="")
    parser.add_argument("--explain", action="store_true", help="what the passes did")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        if compiled.is_source(args.file):
            return _text_model(args)
        net = convnets.load(args.file)
        target = args.output or args.file.with_suffix(".pvrm")
        ready = convnet.prepared(net)
        given = plan(ready, args.weights)
        found = fit(given, profiles.load(args.profile)) if args.profile else None
        named = {"name": args.name or args.file.stem, "licence": args.licence}
        if os.path.exists(target) and os.path.samefile(target, args.file):
            raise InvalidArgument("The compiled model would take its source's place.")
        convnet.write(target, net, args.weights, named)
    except (PvrError, OSError) as e:
        return _failed(e, args.json)
    facts = report(net, args.file, target, given)
    text = [_said(facts)]
    if found:
        facts["profile"] = vars(found)
        text.append(_said_fit(found))
    if args.explain:
        text.append(explain(Graph((), {}, log=ready.log)))
    print(json.dumps({**facts, "text": "\n".join(text)}) if args.json else "\n".join(text))
    return OK


def _text_model(args: argparse.Namespace) -> int:
    """Compiles a language model.

    Raises:
        InvalidArgument: an option that is for pictures alone.
        BadModel, UnsupportedModel, PvrError, OSError
    """
    if args.profile or args.licence:
        raise InvalidArgument("--profile and --licence are for networks that enlarge pictures.")
    source = Path(os.path.abspath(args.file))
    stem = source.name if source.is_dir() else source.stem
    target = args.output or source.with_name(f"{stem}.pvrm")
    wished = "" if args.weights == "f16" else args.weights
    info, graph = compiled.write(args.file, target, wished, args.name or "")
    text = (
        f"{target}: {info['arch']}, {info['layers']} layers, {info['parameters'] / 1e6:.1f} million"
        f" parameters in {info['format']}, {len(graph.nodes)} operations,"
        f" {target.stat().st_size >> 20} MiB."
    )
    if args.explain:
        text += "\n" + explain(graph)
    facts = {"source": str(args.file), "output": str(target), **info, "nodes": len(graph.nodes)}
    print(json.dumps({**facts, "text": text}) if args.json else text)
    return OK


def _failed(error: PvrError | OSError, as_json: bool) -> int:
    name = error.name if isinstance(error, PvrError) else "Failed"
    if as_json:
        print(json.dumps({"error": name, "message": str(error)}))
    else:
        print(f"engine.compile: {error}", file=sys.stderr)
    return NOT_RUN if name in ("BadModel", "UnsupportedModel", "InvalidArgument") else FAILED


if __name__ == "__main__":
    sys.exit(main())
