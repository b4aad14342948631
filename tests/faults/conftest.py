# SPDX-License-Identifier: Apache-2.0
"""What all cells share: models, references of an undisturbed CPU, caches that are warm."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.backends.cpu import CpuBackend
from engine.video.frames import FrameFormat, empty, samples
from engine.video.network import VideoModel
from engine.video.upscale import VideoPipeline
from tests.e2e.conftest import PROMPT, write_tiny
from tests.faults.cells import CONFIG, Place, Reference, Result
from tests.faults.daemon import ROOT, Daemon, compiled_preload
from tests.faults.plant import CONV, LATE_SWIGLU, SWIGLU, planted
from tests.faults.work import CONTEXT, FRAMES, HEIGHT, WIDTH, Ask, State, Text, Work, frame

MARGIN = 0.3  # between the two best tokens, at least, everywhere: ids have to be equal then
LONG, SHORT, MANY = 12, 100, 40


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


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Everything is done once undisturbed: compiled models, verdicts and shaders are there then."""
    folder = tmp_path_factory.mktemp("faults")
    models = folder / "models"
    models.mkdir()
    write_tiny(models)
    (folder / "reference").mkdir()
    reference = references(folder / "reference", models)
    home = _warm(folder / "warm", models, reference)

    def warm(target: Path) -> None:
        shutil.copytree(home, target)

    @functools.cache
    def kernels(kind: str) -> Path:
        changes = {"now": [SWIGLU, CONV], "later": [LATE_SWIGLU]}[kind]
        return planted(folder / f"planted-{kind}", *changes)

    return Place(
        folder, models, reference, warm, compiled_preload(folder),
        lambda state: kernels("later" if state == "decode" else "now"),
    )  # fmt: skip


def _warm(folder: Path, models: Path, reference: Reference) -> Path:
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


@pytest.fixture(scope="session")
def results() -> Iterator[list[Result]]:
    """What each cell came to; $PVRD_FAULT_REPORT gets it as JSON."""
    found: list[Result] = []
    yield found
    if target := os.environ.get("PVRD_FAULT_REPORT"):
        Path(target).write_text(json.dumps([asdict(r) for r in found], indent=1))


def names(values: Any) -> list[str]:
    """Ids of parameters."""
    return [re.sub(r"\W+", "-", value.name) for value in values]


assert CONTEXT == 256
