# SPDX-License-Identifier: Apache-2.0
"""Writes the luma network of a video model as a user shader of mpv and libplacebo.

    python -m engine.export_mpv MODEL OUT.glsl [--json]

MODEL is a .pvrm file, or the name of one that comes with pvrd (fast, balanced-x3, nsr-quality …).
The form is that of mpv's manual ("glsl-shaders") and libplacebo's "Custom Shaders": a pass for
each four channels of a layer, in textures of four halves; each hooks LUMA, and the last one makes
it larger. The player enlarges chroma and does the rest.

Where the network reads beyond the picture, players repeat the edge of each layer, pvrd that of the
picture: the outermost samples, as many as there are convolutions, differ a little.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import InvalidArgument, PvrError
from engine.pvrm import Pvrm
from engine.video import network
from kernels.contract import ceil_div

OK, FAILED, USAGE, NOT_RUN = 0, 1, 2, 5
MODELS = Path(__file__).with_name("video") / "models"
MARGIN = 0.2  # a player that enlarges by less than scale - 1 and this does without
F32 = npt.NDArray[np.float32]


def found(model: str) -> Path:
    """The file of a model, or of one that comes with pvrd.

    Raises:
        InvalidArgument: there is none.
    """
    if os.path.exists(model):
        return Path(model)
    if os.sep not in model:
        for name in (model, f"nsr-{model}"):
            if (path := MODELS / f"{name.removesuffix('.pvrm')}.pvrm").is_file():
                return path
    ours = ", ".join(sorted(p.stem.removeprefix("nsr-") for p in MODELS.glob("nsr-*.pvrm")))
    raise InvalidArgument(f"There is no file {model}, and pvrd comes with {ours}.")


class _Layer:
    """A convolution: taps [cin, 3, 3, cout], bias and slope [cout]; `add`: the layer whose result
    is added before the PReLU."""

    def __init__(self, blob: F32, cin: int, cout: int, real: int) -> None:
        """real: outputs that mean something; zeros behind them."""
        taps, tail = blob[: cin * 9 * cout], blob[cin * 9 * cout :].reshape(2, cout)
        self.taps = taps.reshape(cin, 3, 3, cout)[..., :real]
        self.bias, self.slope = tail[0, :real], tail[1, :real]
        self.add: int | None = None
        self.groups = ceil_div(real, 4)


def _blob(file: Pvrm, name: str, count: int) -> F32:
    values: F32 = network.floats(file, name, count).view("<f4").astype(np.float32)
    return values


def _layers(file: Pvrm, shape: network.Shape) -> list[_Layer]:
    last = len(shape.convs) - 1
    made = []
    for i, (cin, cout) in enumerate(shape.convs):
        blob = _blob(file, f"conv{i}", network.conv_words(cin, cout))
        made.append(_Layer(blob, cin, cout, shape.scale**2 if i == last else cout))
    for a, b in shape.skips:
        made[b].add = a
        made[b].slope = _blob(file, f"skip{b}", shape.channels)
    return made


def _four(values: F32, at: int) -> F32:
    """Four of them from `at` on, filled up with zeros: along the last axis."""
    cut = values[..., at : at + 4]
    room = [(0, 0)] * (cut.ndim - 1) + [(0, 4 - cut.shape[-1])]
    return np.pad(cut, room)


def _numbers(values: Any) -> str:
    # Nine digits are a float32; players' compilers may not know 1e-05 without a point.
    return ", ".join(f"{float(v):.9g}" if "." in f"{float(v):.9g}" else f"{float(v):.9e}"
                     for v in np.asarray(values).reshape(-1))  # fmt: skip


def _head(scale: int, what: str, binds: Sequence[str], save: str, components: int) -> list[str]:
    least = f"{scale - 1 + MARGIN:g}"
    return [
        f"//!DESC pvrd x{scale}: {what}",
        "//!HOOK LUMA",
        *[f"//!BIND {name}" for name in binds],
        *([f"//!SAVE {save}"] if save else []),
        *([] if save else [f"//!WIDTH LUMA.w {scale} *", f"//!HEIGHT LUMA.h {scale} *"]),
        f"//!COMPONENTS {components}",
        f"//!WHEN OUTPUT.w LUMA.w / {least} > OUTPUT.h LUMA.h / {least} > *",
    ]


def _name(layer: int, group: int) -> str:
    return f"PVRD_{layer}_{group}"


def _convolution(i: int, layers: Sequence[_Layer], group: int, base: F32, scale: int) -> list[str]:
    """The pass of four channels of a layer; to the last layer's the linear filter is added."""
    layer, at = layers[i], 4 * group
    sources = [_name(i - 1, g) for g in range(layers[i - 1].groups)] if i else ["LUMA"]
    last = i == len(layers) - 1
    binds = [*sources, *(["LUMA"] if last and i else [])]
    body = ["vec4 hook() {", f"    vec4 r = vec4({_numbers(_four(layer.bias, at))});"]
    for row in range(3):
        for column in range(3):
            where = f"vec2({column - 1}.0, {row - 1}.0)"
            taps = _four(layer.taps[:, row, column], at)
            if not i:
                body.append(f"    r += vec4({_numbers(taps[0])}) * LUMA_texOff({where}).x;")
                continue
            for g, source in enumerate(sources):
                columns = taps[4 * g : 4 * g + 4]
                body.append(f"    r += mat4({_numbers(columns)}) * {source}_texOff({where});")
    if layer.add is not None:
        added = _name(layer.add, group)
        binds += [] if added in binds else [added]
        body.append(f"    r += {added}_texOff(vec2(0.0));")
    if np.any(layer.slope != 1):
        slope = _numbers(_four(layer.slope, at))
        body.append(f"    r = max(r, 0.0) + vec4({slope}) * min(r, 0.0);")
    if last:
        for row in range(5):
            for column in range(5):
                weights = _numbers(_four(base[:, row, column], at))
                where = f"vec2({column - 2}.0, {row - 2}.0)"
                body.append(f"    r += vec4({weights}) * LUMA_texOff({where}).x;")
    what = f"layer {i + 1} of {len(layers)}, channels {at} to {at + 3}"
    return [*_head(scale, what, binds, _name(i, group), 4), *body, "    return r;", "}", ""]


def _shuffle(last: int, groups: int, scale: int) -> list[str]:
    """The pass that puts the phases (scale * row + column) where they belong."""
    names = [_name(last, g) for g in range(groups)]
    body = [
        "vec4 hook() {",
        f"    vec2 place = floor(LUMA_pos * LUMA_size * {scale}.0);",
        f"    vec2 from = floor((place + 0.5) / {scale}.0);",
        f"    vec2 phase = place - {scale}.0 * from;",
        f"    int n = int(phase.y + 0.5) * {scale} + int(phase.x + 0.5);",
        "    vec2 at = (from + 0.5) / LUMA_size;",
    ]
    for g, name in enumerate(names):
        test = f"    if (n / 4 == {g}) " if groups > 1 else "    "
        body.append(f"{test}return vec4({name}_tex(at)[n % 4], 0.0, 0.0, 1.0);")
    if groups > 1:
        body.append("    return vec4(0.0, 0.0, 0.0, 1.0);")
    return [*_head(scale, "phases", ["LUMA", *names], "", 1), *body, "}", ""]


def passes(file: Pvrm) -> Iterator[list[str]]:
    """The lines of each pass.

    Raises:
        BadModel, UnsupportedModel: the file is no model of the nsr family.
    """
    _, shape, _ = network.describe(file)
    layers = _layers(file, shape)
    count = 25 * shape.scale**2
    base = _blob(file, "base", count).reshape(-1, 5, 5)
    for i, layer in enumerate(layers):
        for group in range(layer.groups):
            yield _convolution(i, layers, group, base, shape.scale)
    yield _shuffle(len(layers) - 1, layers[-1].groups, shape.scale)


def _write(target: Path, text: str) -> None:
    if target.exists() and not target.is_file():  # a device, a pipe
        target.write_text(text, encoding="utf-8")
        return
    fd, name = tempfile.mkstemp(dir=target.parent, prefix=".pvrctl-", suffix=".glsl")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            out.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def export(model: Path, target: Path) -> dict[str, Any]:
    """Writes the shader; the facts about it.

    Raises:
        InvalidArgument: the shader would take the model's place.
        PvrError: it cannot be written.
        BadModel, UnsupportedModel, OSError
    """
    file = Pvrm.open(str(model), verify=True)
    info = network.describe(file)[0]
    if target.exists() and os.path.samefile(target, model):
        raise InvalidArgument("The shader would take the model's place.")
    made = list(passes(file))
    licence = " ".join(info["licence"].split()) or "that of the model"
    head = [
        f"// {info['name'] or model.stem}: x{info['scale']}, luma, {info['channels']} channels,"
        f" {info['blocks'] + 2} convolutions. Written by pvrctl export.",
        f"// Licence: {licence}",
        "",
    ]
    text = "\n".join([*head, *(line for lines in made for line in lines)])
    try:
        _write(target, text)
    except OSError as e:
        raise PvrError(f"{target} cannot be written: {e.strerror}.") from None
    return {
        "model": info["name"] or model.stem,
        "output": str(target),
        "scale": info["scale"],
        "channels": info["channels"],
        "convolutions": info["blocks"] + 2,
        "passes": len(made),
        "output_bytes": len(text.encode()),
        "licence": licence,
    }


def main(argv: list[str] | None = None) -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(
        prog="engine.export_mpv", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("output", metavar="OUT.glsl", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        facts = export(found(args.model), args.output)
    except (PvrError, OSError) as error:
        name = error.name if isinstance(error, PvrError) else "Failed"
        if args.json:
            print(json.dumps({"error": name, "message": str(error)}))
        else:
            print(f"engine.export_mpv: {error}", file=sys.stderr)
        return NOT_RUN if name in ("BadModel", "UnsupportedModel", "InvalidArgument") else FAILED
    text = (
        f"{facts['output']}: {facts['model']}, x{facts['scale']} of luma in {facts['passes']}"
        f" passes, {facts['output_bytes'] / 1e3:.0f} kB."
    )
    print(json.dumps({**facts, "text": text}) if args.json else text)
    return OK


if __name__ == "__main__":
    sys.exit(main())
