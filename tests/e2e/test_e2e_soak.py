# SPDX-License-Identifier: Apache-2.0
"""Work from many clients while workers are killed all the time: nothing is lost or differs."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from pvrd.client import Client
from tests.buses import until
from tests.daemons import PROMPT, Daemon

pytestmark = [pytest.mark.bus, pytest.mark.gpu, pytest.mark.long]

KILLS = 16
VARIED_S = 0.5  # so long, by chance, work goes on before a kill
LONG_S = 300.0  # a bound on waiting; a test that meets it has failed
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
            "deadlines.slice_s": 60.0,  # no kills but ours, on a slow machine too
        }
    )
    running.wait_s = LONG_S
    stop = threading.Event()
    errors: list[BaseException] = []
    wanted: list[list[int]] = []
    count: Counter[str] = Counter()
    lock = threading.Lock()
    done = [0] * 5  # by client

    def loop(number: int, work: Callable[[Client, list[list[int]]], int]) -> None:
        try:
            with running.client() as client:
                while not stop.is_set():
                    made = work(client, wanted)
                    with lock:
                        count[f"{work.__name__} sum"] += made
                        count[work.__name__] += 1
                        done[number] += 1
        except BaseException as e:
            errors.append(e)
            stop.set()

    works = (write, write, write, play, play)
    threads = [threading.Thread(target=loop, args=(i, w)) for i, w in enumerate(works)]
    draw = random.Random(1)
    with running.client() as client:
        running.ready(client, "gpu")
        for thread in threads:
            thread.start()
        try:
            for _ in range(KILLS):
                # Each has done something since the last kill, so none meets as many as end a job.
                before = list(done)
                until(
                    lambda before=before: stop.is_set() or all(map(int.__gt__, done, before)),
                    "work of every client", LONG_S,
                )  # fmt: skip
                if stop.wait(draw.uniform(0, VARIED_S)):
                    break
                device = running.ready(client, draw.choice(["gpu", "gpu", "cpu"]))
                os.kill(device["pid"], draw.choice([signal.SIGKILL, signal.SIGSEGV]))
                count["kills"] += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        statistics = client.statistics()
    assert not errors, errors
    assert count["kills"] == KILLS
    assert count["write sum"] > 0  # some answers did meet a kill
    assert statistics["jobs"]["done"] == count["write"]
    assert statistics["jobs"]["failed"] == 0
    assert statistics["frames"]["done"] == count["play sum"]
    log = running.log.read_text()
    assert "Traceback" not in log
    assert PROMPT not in log
