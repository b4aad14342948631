# SPDX-License-Identifier: Apache-2.0
"""Work from many clients while workers are killed all the time: nothing is lost or differs."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pvrd.client import Client
from tests.daemons import PROMPT, Daemon

pytestmark = [pytest.mark.bus, pytest.mark.gpu, pytest.mark.long]

SECONDS = 60.0
BETWEEN_S = 2.0  # no job meets as many kills as end it
TOKENS = 60
VIDEO = {"width": 64, "height": 48, "model": "nsr-fast", "slots": 2}


def write(client: Client, wanted: list[list[int]]) -> int:
    """One answer; how many workers died under it. The first answer of all is what is wanted."""
    with client.open_text({"model": "tiny", "context": 128}) as session:
        events = list(session.generate(PROMPT, {"max_tokens": TOKENS}))
    ids = [e["id"] for e in events if "id" in e]
    assert [e["n"] for e in events if "id" in e] == list(range(TOKENS))
    wanted.append(ids)
    assert ids == wanted[0]
    return int(events[-1]["restarts"])


def play(client: Client, wanted: list[list[int]]) -> int:
    """Ten frames, each of one grey; how many there were."""
    with client.open_video(VIDEO) as video:
        for seq in range(10):
            slot = seq % video.slots
            for pieces in video.input(slot):
                for piece in pieces:
                    piece[:] = bytes([100 + seq]) * len(piece)
            video.submit(seq, slot)
            while (done := video.receive()) is None:
                pass
            assert (done.seq, done.slot, done.dropped) == (seq, slot, False)
            pixels = b"".join(bytes(piece) for piece in video.output(slot)[0])
            assert max(abs(p - 100 - seq) for p in pixels) <= 2
    return 10


def test_workers_die_all_the_time(daemon: Callable[..., Daemon]) -> None:
    running = daemon(
        {
            "gpu.allow_software": True,
            "workers.backoff_s": 0.1,
            "workers.backoff_max_s": 0.5,
            "deadlines.slice_s": 10.0,
        }
    )
    stop = threading.Event()
    errors: list[BaseException] = []
    wanted: list[list[int]] = []
    count: Counter[str] = Counter()
    lock = threading.Lock()

    def loop(work: Callable[[Client, list[list[int]]], int]) -> None:
        try:
            with running.client() as client:
                while not stop.is_set():
                    number = work(client, wanted)
                    with lock:
                        count[f"{work.__name__} sum"] += number
                        count[work.__name__] += 1
        except BaseException as e:
            errors.append(e)
            stop.set()

    threads = [threading.Thread(target=loop, args=(w,)) for w in (write, write, write, play, play)]
    draw = random.Random(1)
    with running.client() as client:
        running.ready(client, "gpu")
        for thread in threads:
            thread.start()
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and not stop.wait(BETWEEN_S):
            device: dict[str, Any] = running.device(client, draw.choice(["gpu", "gpu", "cpu"]))
            if device["state"] == "ready":
                os.kill(device["pid"], draw.choice([signal.SIGKILL, signal.SIGSEGV]))
                count["kills"] += 1
        stop.set()
        for thread in threads:
            thread.join()
        statistics = client.statistics()
    assert not errors, errors
    assert count["kills"] >= 5
    assert count["write sum"] > 0  # some answers did meet a kill
    assert statistics["jobs"]["done"] == count["write"]
    assert statistics["jobs"]["failed"] == 0
    assert statistics["frames"]["done"] == count["play sum"]
    log = running.log.read_text()
    assert "Traceback" not in log
    assert PROMPT not in log
