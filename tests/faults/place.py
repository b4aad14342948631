# SPDX-License-Identifier: Apache-2.0
"""What rows have in common: what is right, from an undisturbed CPU, and a home of pvrd in which
everything was done once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.backends.cpu import CpuBackend
from engine.video.frames import FrameFormat, empty, samples
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline
from tests.daemons import PROMPT
from tests.faults.daemon import ROOT, Daemon
from tests.faults.rows import CONFIG
from tests.faults.work import FRAMES, HEIGHT, WIDTH, Ask, State, Text, Work, frame

MARGIN = 0.3  # between the two best tokens, at least, everywhere: ids have to be equal then
LONG, SHORT, MANY = 12, 100, 40


@dataclass
class Reference:
    """What is right: tokens of each ask, frames, and the asks of each state."""

    ids: Mapping[Ask, list[int]]
    frames: list[Any]
    short: Ask
    many: list[Ask]
    long: Ask

    def asks(self, state: State) -> list[Ask]:
        """The asks of a state."""
        if state.long:
            return [self.long]
        return self.many if state.texts > 1 else [self.short]


@dataclass
class Place:
    """What rows have in common: folders, references, a warmed cache, planted kernels."""

    folder: Path
    models: Path
    reference: Reference
    warm: Callable[[Path], None]  # fills the home of a daemon
    preload: Path
    planted: Callable[[str], Path]


def enlarged() -> list[list[np.ndarray]]:
    """What the engine itself makes of each frame, on the CPU."""
    backend = CpuBackend(1)
    model = VideoModel.load(str(ROOT / "engine/video/models/nsr-fast.pvrm"), backend)
    pipeline = VideoPipeline(backend, model, FrameFormat(WIDTH, HEIGHT))
    found = []
    for seq in range(FRAMES):
        given, out = empty(FrameFormat(WIDTH, HEIGHT)), empty(pipeline.out_format)
        for plane, values in zip(given, frame(seq), strict=True):
            plane[:, : values.shape[1]] = values
        pipeline.begin(given, out)
        while not pipeline.step():
            pass
        sizes = [p.width for p in pipeline.out_format.planes()]
        found.append([samples(v, w, 8).astype(int) for v, w in zip(out, sizes, strict=True)])
    return found


def without_ties(text: Text) -> bool:
    """Are the two best tokens everywhere far enough apart?"""
    best = [e["top5"] for e in text.events if "top5" in e]
    return min(b[0][1] - b[1][1] for b in best) > MARGIN


def references(folder: Path, models: Path) -> Reference:
    """Prompts whose answers are the same on all devices, and the answers of a CPU."""
    words = [f"w{i % 37} w{3 * i % 31}" for i in range(120)]
    asks = [Ask(f"{PROMPT} {word}", MANY) for word in words]
    longs = [Ask(f"w{i} " * 36 + "and", LONG) for i in range(12)]
    daemon = Daemon(folder, models, {**CONFIG, "gpu.enabled": False})
    daemon.start()
    sure: dict[Ask, list[int]] = {}
    try:
        with daemon.client() as client:
            daemon.ready(client, "cpu")
            for ask in [Ask(PROMPT, SHORT), *longs, *asks]:
                kind = [known for known in sure if known.tokens == ask.tokens]
                if len(kind) >= (8 if ask.tokens == MANY else 1):
                    continue
                text = Text(client, ask, "cpu")
                text.start(top5=True)
                work = Work(client, State("one"), [], texts=[text])
                work.follow(work.over)
                assert text.events[-1]["type"] == "end", text.events[-1]
                if len(text.ids) == ask.tokens and without_ties(text):
                    sure[ask] = text.ids
                work.close()
    finally:
        daemon.stop()
    by = {n: [ask for ask in sure if ask.tokens == n] for n in (SHORT, MANY, LONG)}
    assert len(by[MANY]) == 8
    return Reference(sure, enlarged(), by[SHORT][0], by[MANY], by[LONG][0])


def warmed(folder: Path, models: Path, reference: Reference) -> Path:
    """Compiled models, verdicts and shaders are there afterwards; the home."""
    folder.mkdir()
    daemon = Daemon(folder, models, {"gpu.allow_software": True, "text.chunk": 16})
    daemon.start()
    try:
        with daemon.client() as client:
            daemon.ready(client, "gpu")
            state = State("warm", texts=8, video=True)
            work = Work(client, state, reference.many, "gpu", reference.frames)
            work.open()
            work.start()
            work.follow(work.over)
            work.check(reference.ids)
            work.close()
    finally:
        daemon.stop()
    return folder / "home"
