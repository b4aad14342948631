# SPDX-License-Identifier: Apache-2.0
"""The networks that are trained: what each looks like, what it starts from and what it may cost."""

from __future__ import annotations

from dataclasses import dataclass

from net import Shape


@dataclass(frozen=True)
class Network:
    """One training. `start` names the network whose weights it begins with (those of another scale
    give the trunk); `begin` and `end` are shares of the time given, so that a network can wait for
    its start. `rate` is the peak of the learning rate. `half`: on CUDA the layers run in
    bfloat16 (weights, optimiser, average and linear filter stay in float32).
    """

    name: str
    tier: str
    shape: Shape
    start: str = ""
    flavour: str = "plain"
    begin: float = 0.0
    end: float = 1.0
    batch: int = 32
    patch: int = 64
    rate: float = 1e-3
    half: bool = False
    seed: int = 1


def _luma(tier: str, channels: int, convs: int) -> list[Network]:
    shapes = {s: Shape(s, channels, convs) for s in (2, 3, 4)}
    name = f"nsr-{tier}"
    return [
        Network(name, tier, shapes[2], start=name, half=True, seed=2),
        Network(f"{name}-x3", tier, shapes[3], start=name, end=0.65, half=True, seed=3),
        Network(f"{name}-x4", tier, shapes[4], start=name, half=True, seed=4),
        Network(
            f"{name}-compressed",
            tier,
            shapes[2],
            start=name,
            flavour="compressed",
            end=0.5,
            half=True,
            seed=5,
        ),
    ]


def _quality() -> list[Network]:
    def one(name: str, scale: int, start: str, begin: float, seed: int) -> Network:
        shape = Shape(scale, 32, 13, skip=((0, 11),))
        return Network(
            name,
            "quality",
            shape,
            start=start,
            begin=begin,
            batch=16,
            patch=96,
            rate=6e-4,
            half=True,
            seed=seed,
        )

    return [
        one("nsr-quality", 2, "", 0.0, 6),
        one("nsr-quality-x3", 3, "nsr-quality", 0.5, 7),
        one("nsr-quality-x4", 4, "nsr-quality", 0.3, 8),
    ]


def _chroma() -> list[Network]:
    return [
        Network(
            f"chroma-x{scale}-{siting}",
            "chroma",
            Shape(scale, 8, 3, siting=siting),
            end=0.25,
            patch=40,
            rate=2e-3,
            seed=10 * scale,
        )
        for scale in (2, 3, 4)
        for siting in ("left", "centre")
    ]


NETWORKS = {
    n.name: n for n in [*_luma("fast", 8, 6), *_luma("balanced", 16, 7), *_quality(), *_chroma()]
}
