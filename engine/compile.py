# SPDX-License-Identifier: Apache-2.0
"""Compiles somebody's network into a model that pvrd runs.

    python -m engine.compile FILE [-o OUT.pvrm] [--weights f16|q8|q4] [--calibrate TEXT|none]
        [--profile NAME] [--name NAME] [--licence TEXT] [--explain] [--without PASS] [--rate GB/S]
        [--json]

FILE is a language model: a Hugging Face folder or GGUF. --weights q8 is for its float matrices, q4
for all but those at its ends; the steps of 4-bit weights are searched by what a text (--calibrate,
by default a short one of our own) shows to matter, and what q8 and q4 cost in perplexity over the
rest of that text is said. Or FILE is a network that enlarges pictures: ONNX, ncnn's .param or .bin
(the other one beside it), or a checkpoint (.pth, .safetensors: needs PyTorch and spandrel). What is
not run is named with its node, and nothing is written then. --profile says how it would run on a
device of that profile, --explain what each pass did. With --json there is one object on standard
output, {"error", "message"} where it failed. Exit status 0; 5: the file is no network that is run;
2: wrong usage; 1: the result cannot be written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backends import profiles
from engine.backends.base import DeviceInfo
from engine.backends.cpu import CpuBackend
from engine.backends.profiles import Profile
from engine.errors import InvalidArgument, PvrError
from engine.graph import Graph, explain
from engine.importers import convnets
from engine.passes import OPTIONAL
from engine.text import calibrate, compiled
from engine.text.fit import Fit
from engine.text.fit import fit as fit_text
from engine.text.model import TextModel
from engine.video import convnet, convnet_pack
from engine.video.convnet_colour import planes
from engine.video.convnet_graph import Net
from engine.video.convnet_lower import PART_MACS, Plan, lower, plan
from engine.video.convnet_windows import Windows, windows
from engine.video.frames import FrameFormat

OK, FAILED, USAGE, NOT_RUN = 0, 1, 2, 5
NO_TEXT = "none"  # of --calibrate
MAX_TEXT = 64 << 20  # bytes of a text for it
FRAME = (960, 540)  # the frame for which --profile says how it would be cut


@dataclass(frozen=True)
class FrameFit:
    """How frames of FRAME run on a device."""

    profile: str
    tiles: int
    window: tuple[int, int]
    overlap: int
    parts: int
    mebibytes: int


def fit(given: Plan, profile: Profile) -> FrameFit:
    """How a network runs on the device of a profile.

    Raises:
        InvalidArgument: not at all.
        BadModel: a kernel does not fit the device.
    """
    device = _device(profile)
    cut: Windows = windows(given, *FRAME, device)
    fmt = FrameFormat(*FRAME, "i420")
    shown = planes(fmt, given.scale, given.net.colours)
    program = lower(given, shown, cut.width, cut.height, device, PART_MACS)
    nbytes = sum(b.nbytes for b in program.buffers.values())
    size = (cut.width, cut.height)
    return FrameFit(
        profile.name, cut.tiles, size, cut.overlap, int(program.meta["parts"]), nbytes >> 20
    )


def _device(profile: Profile) -> DeviceInfo:
    return DeviceInfo("gpu", profile.name, "", False, profile.alone(), profile.features)


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


def _said_text_fit(profile: str, found: Fit, rate: float) -> str:
    text = (
        f"{profile}: a session of {found.context} tokens takes {found.weights >> 20} MiB of"
        f" weights, {found.caches >> 20} MiB of caches and {found.work >> 20} MiB to work in; a"
        f" token is {found.calls} kernel calls and {found.moved / 1e6:.1f} MB, prompts come in"
        f" pieces of {found.chunk}."
    )
    if rate:
        text += f" At {rate:g} GB/s that is at most {rate * 1e9 / found.moved:.1f} tokens/s."
    return text


def _said_fit(found: FrameFit) -> str:
    cut = "whole" if found.tiles == 1 else f"in {found.tiles} tiles"
    return (
        f"{found.profile}: a frame of {FRAME[0]}x{FRAME[1]} {cut}, windows of"
        f" {found.window[0]}x{found.window[1]}, overlap {found.overlap}, {found.parts} parts each,"
        f" {found.mebibytes} MiB."
    )


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError
    return value


_rate.__name__ = "number of GB/s"


def main(argv: list[str] | None = None) -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(
        prog="engine.compile", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("-o", "--output", metavar="OUT.pvrm", type=Path)
    parser.add_argument("--weights", choices=(*convnet_pack.FORMATS, "q4"), default="f16")
    parser.add_argument(
        "--calibrate", metavar="TEXT", default="",
        help="a text file to fit and judge q8 and q4 by (default: a short one), or none",
    )  # fmt: skip
    parser.add_argument("--profile", choices=profiles.names(), metavar="NAME")
    parser.add_argument("--name", help="what the model calls itself (default: the file's name)")
    parser.add_argument("--licence", default="")
    parser.add_argument("--explain", action="store_true", help="what the passes did")
    parser.add_argument(
        "--without", action="append", choices=sorted(OPTIONAL), default=[], metavar="PASS",
        help=f"leave a pass out: {', '.join(sorted(OPTIONAL))} (language models)",
    )  # fmt: skip
    parser.add_argument(
        "--rate", type=_rate, default=0, metavar="GB/S",
        help="what the profile's device reads in a second, to predict tokens/s (language models)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        if compiled.is_source(args.file):
            return _text_model(args)
        if args.weights == "q4" or args.calibrate:
            raise InvalidArgument("--weights q4 and --calibrate are for language models.")
        net = convnets.load(args.file)
        target = args.output or args.file.with_suffix(".pvrm")
        ready = convnet.prepared(net)
        given = plan(ready, args.weights)
        found = fit(given, profiles.load(args.profile)) if args.profile else None
        named = {"name": args.name or args.file.stem, "licence": args.licence}
        _spare(target, args.file)
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


def _spare(target: Path, source: Path) -> None:
    """Nothing that a model is compiled from is overwritten: not the file, nor what else lies in its
    folder or beside it under the same name (ncnn's other half).

    Raises:
        InvalidArgument: `target` is such a file.
    """
    if not target.exists() or (target.suffix == ".pvrm" and source.suffix != ".pvrm"):
        return
    folder, beside = source.is_dir(), target.stem == source.stem
    parts = source if folder else source.parent
    within = (folder or beside) and parts.samefile(target.parent)
    if within or target.samefile(source):
        raise InvalidArgument("The compiled model would take its source's place.")


def _text_model(args: argparse.Namespace) -> int:
    """Compiles a language model.

    Raises:
        InvalidArgument: an option that is for pictures alone.
        BadModel, UnsupportedModel, PvrError, OSError
    """
    if args.licence:
        raise InvalidArgument("--licence is for networks that enlarge pictures.")
    source = Path(os.path.abspath(args.file))
    stem = source.name if source.is_dir() else source.stem
    target = args.output or source.with_name(f"{stem}.pvrm")
    _spare(target, source)
    narrow, wished = args.weights == "q4", "q8" if args.weights == "q8" else ""
    found: list[Fit] = []

    def judge(graph: Graph) -> None:
        if args.profile:
            found.append(fit_text(graph, _device(profiles.load(args.profile))))

    name = args.name or ""
    judged = _Judge(args) if args.weights != "f16" and args.calibrate != NO_TEXT else None
    importance = (judged.importance() if judged else {}) if narrow else None
    info, graph = compiled.write(
        args.file, target, wished, name, args.without, judge, narrow, importance
    )
    text = (
        f"{target}: {info['arch']}, {info['layers']} layers, {info['parameters'] / 1e6:.1f} million"
        f" parameters in {info['format']}, {len(graph.nodes)} operations,"
        f" {target.stat().st_size >> 20} MiB."
    )
    if args.explain:
        text += "\n" + explain(graph)
    facts = {"source": str(args.file), "output": str(target), **info, "nodes": len(graph.nodes)}
    if judged:
        facts["perplexity"] = cost = judged.cost(target)
        text += (
            f"\nPerplexity over {cost['tokens']} tokens of {cost['text']}: {cost['before']:.2f} as"
            f" the source is, {cost['after']:.2f} now"
            f" ({100 * (cost['after'] / cost['before'] - 1):+.1f} %)."
        )
    for known in found:
        facts["profile"] = {"profile": args.profile, **vars(known)}
        text += "\n" + _said_text_fit(args.profile, known, args.rate)
    print(json.dumps({**facts, "text": text}) if args.json else text)
    return OK


class _Judge:
    """The source as it is, on the CPU, and a text.

    Raises:
        InvalidArgument: there is no such text, or it is too short.
        PvrError: the source cannot be run.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        path = Path(args.calibrate) if args.calibrate else calibrate.TEXT
        try:
            with path.open("rb") as file:
                data = file.read(MAX_TEXT + 1)
            if len(data) > MAX_TEXT:
                raise InvalidArgument(f"The text {path.name} has more than {MAX_TEXT >> 20} MiB.")
            text = data.decode("utf-8")
        except OSError as e:
            raise InvalidArgument(f"The text {path.name} cannot be read: {e.strerror}.") from None
        except UnicodeDecodeError:
            raise InvalidArgument(f"The text {path.name} is not UTF-8.") from None
        self._name, self._source = path.name, args.file
        self._backend = CpuBackend()
        with closing(self._load(args.file)) as model:
            self._text = calibrate.windows(model, text)

    def _load(self, path: Path) -> TextModel:
        return TextModel.load(path, "", self._backend)

    def importance(self) -> compiled.Importance:
        """Of columns of the source's matrices."""
        with closing(self._load(self._source)) as model:
            return calibrate.importance(model, self._text.fitted)

    def cost(self, target: Path) -> dict[str, Any]:
        """Perplexity before and after."""
        found = []
        for path in (self._source, target):
            with closing(self._load(path)) as model:
                found.append(calibrate.perplexity(model, self._text.judged))
        cut = self._text.judged
        count = sum(len(ids) - 1 - len(ids) // 2 for ids in cut)
        return {"text": self._name, "tokens": count, "before": found[0], "after": found[1]}


def _failed(error: PvrError | OSError, as_json: bool) -> int:
    name = error.name if isinstance(error, PvrError) else "Failed"
    said = str(error)
    if isinstance(error, OSError) and error.strerror:
        said = f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    if as_json:
        print(json.dumps({"error": name, "message": said}))
    else:
        print(f"engine.compile: {said}", file=sys.stderr)
    return NOT_RUN if name in ("BadModel", "UnsupportedModel", "InvalidArgument") else FAILED


if __name__ == "__main__":
    sys.exit(main())
