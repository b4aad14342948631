# SPDX-License-Identifier: Apache-2.0
"""Mixed clients and random faults for as long as you like, every output checked all along.

    python -m benchmarks.soak --minutes N [--seed S] [--calm] [--log FILE]

A pvrd of its own with its CPU worker and a GPU worker (a software GPU will do). Texts are compared
with those of an undisturbed CPU (greedy, prompts without near ties), frames without deadlines with
the engine's own; talks that grow (and reuse their prefix), vectors, labels and pictures with the
first ones; of frames with deadlines each has to come once, in order. Faults are drawn from --seed:
workers killed, stopped, their device lost; holds; clients that are killed; --calm has none. Each
sample has the resident memory and the fds of pvrd and its workers, and the latency of texts. A line
is fitted through the means of blocks of samples (the first fifth is left out): something drifts
when the least of its rise, by a 99 % interval, is above its bound. Exit status 1: a wrong or lost
output, or a drift. --log gets the samples, a JSON object a line. 72 hours are --minutes 4320.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import common
from pvrd.client import Client
from pvrd.errors import PvrdError, Timeout
from tests.daemons import PROMPT, write_tiny
from tests.faults.daemon import ROOT, Daemon, open_fds, resident
from tests.faults.place import Reference, references, warmed
from tests.faults.rows import CONFIG
from tests.faults.work import BY_NAME, FRAMES, VIDEO, State, Work

BETWEEN_S = 3.0  # between two faults, at least
ENDS = 2  # of workers that a job may meet: the third ends it
SLICE_S = 6.0  # a busy machine is not to look like a stopped worker
BLOCKS = 12
T99 = 3.17  # Student's t, two-sided, for BLOCKS - 2 degrees of freedom
CHATS = 4
LABELS = ["w1 w2", "w3", "w7 w8 w9"]


@dataclass(frozen=True)
class Trend:
    """A line through samples: the rise over the whole time, its least and most by a 99 % interval,
    in the unit of the samples.
    """

    mean: float
    rise: float
    least: float
    most: float


def trend(values: Sequence[float]) -> Trend:
    """The line through the means of BLOCKS blocks, without the first fifth of the samples."""
    kept = list(values)[len(values) // 5 :]
    size = len(kept) / BLOCKS
    if size < 1:
        return Trend(statistics.fmean(values) if values else 0.0, 0.0, 0.0, 0.0)
    means = [statistics.fmean(kept[int(i * size) : int((i + 1) * size)]) for i in range(BLOCKS)]
    x = [i / (BLOCKS - 1) for i in range(BLOCKS)]
    fit = statistics.linear_regression(x, means)
    errors = [y - fit.intercept - fit.slope * a for a, y in zip(x, means, strict=True)]
    spread = sum((a - 0.5) ** 2 for a in x)
    error = (sum(e * e for e in errors) / (BLOCKS - 2) / spread) ** 0.5
    wide = T99 * error
    return Trend(statistics.fmean(means), fit.slope, fit.slope - wide, fit.slope + wide)


class Soak:
    """The clients, the faults and what is known of both."""

    def __init__(self, daemon: Daemon, reference: Reference, seed: int) -> None:
        self.daemon, self.reference = daemon, reference
        self.draw = random.Random(seed)
        self.stop = threading.Event()
        self.count: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.latency: list[float] = []  # seconds of texts since the last sample
        self.first: dict[str, Any] = {}  # the first vectors, labels and picture
        self._lock = threading.Lock()
        self._ends = 0  # of workers so far
        self._since: dict[int, int] = {}  # of each client: `_ends` when its work began
        self._hit: tuple[str, int] | None = None  # the worker that is ending: kind, generation

    def client(self, name: str, work: Callable[[Client, random.Random], None]) -> threading.Thread:
        """A thread with a client of its own that does this again and again."""
        draw = random.Random(self.draw.random())

        def run() -> None:
            with contextlib.ExitStack() as stack:
                client = stack.enter_context(self.daemon.client())
                while not self.stop.is_set():
                    self._since[threading.get_ident()] = self._ends
                    try:
                        work(client, draw)
                        self.add(name)
                    except Timeout:
                        self.add(f"{name}: Timeout")  # what a call says that would take over 20 s
                    except (AssertionError, PvrdError, OSError) as e:
                        self.fault(name, e)
                        client = stack.enter_context(self.daemon.client())

        return threading.Thread(target=run, name=name)

    def fault(self, name: str, error: BaseException) -> None:
        """Something came out wrong, or not at all."""
        with self._lock:
            self.wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        print(f"WRONG {self.wrong[-1]}", flush=True)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self.count[name] += count

    # -- what clients do

    def text(self, client: Client, draw: random.Random) -> None:
        """An answer, equal to the reference."""
        ask = draw.choice(self.reference.many)
        began = time.monotonic()
        work = Work(client, State("text", texts=1), [ask])
        try:
            work.open()
            work.start()
            work.follow(work.over)
            work.check(self.reference.ids)
        finally:
            work.close()
        with self._lock:
            self.latency.append(time.monotonic() - began)

    def chat(self, client: Client, draw: random.Random) -> None:
        """A talk of some turns in one session, equal to the first one."""
        said = []
        with client.open_text({"model": "tiny", "context": 256}) as session:
            talk = [{"role": "user", "content": PROMPT}]
            for turn in range(CHATS):
                events = list(session.chat(talk, {"max_tokens": 8, "top5": True}))
                said.append([e["id"] for e in events if "id" in e])
                ties = [e["top5"] for e in events if "top5" in e]
                text = "".join(str(e.get("text", "")) for e in events)
                if min((b[0][1] - b[1][1] for b in ties), default=1.0) < 0.1:
                    break  # from a near tie on devices may differ
                talk += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": f"w{turn}"},
                ]
        self.same("chat", said)

    def query(self, client: Client, draw: random.Random) -> None:
        """Vectors and labels, as the first ones."""
        with client.open_text({"model": "tiny", "context": 128}) as session:
            vectors = np.asarray(session.embed([PROMPT, "w1 w2 w3"], {}))
            label, shares = session.classify("w4 w5", LABELS, {})
        first, best, parts = self.first.setdefault("query", (vectors, label, shares))
        assert np.abs(vectors - first).max() < 0.02, "other vectors"
        assert max(abs(shares[k] - parts[k]) for k in parts) < 0.05, "other shares"
        assert label == best or abs(parts[label] - parts[best]) < 0.05, "another label"

    def video(self, client: Client, draw: random.Random) -> None:
        """Frames without deadlines: each compared."""
        work = Work(client, BY_NAME["video"], [], "auto", self.reference.frames)
        try:
            work.open()
            work.start()
            work.follow(work.over)
            work.check({})
        finally:
            work.close()
        self.add("frames", FRAMES)

    def timed(self, client: Client, draw: random.Random) -> None:
        """Frames with deadlines: each answered once, in order."""
        with client.open_video({**VIDEO, "device": "auto"}) as video:
            free = list(range(video.slots))
            seqs: list[int] = []
            seq = 0
            while len(seqs) < FRAMES:
                while free and seq < FRAMES and video.credits:
                    slot = free.pop()
                    soon = time.monotonic() + draw.uniform(0.02, 0.5)
                    video.submit(seq, slot, deadline=int(1e9 * soon))
                    seq += 1
                if (done := video.receive()) is not None:
                    seqs.append(done.seq)
                    free.append(done.slot)
                    self.add("dropped" if done.dropped else "timed frames")
            assert seqs == list(range(FRAMES)), "frames out of order"

    def picture(self, client: Client, draw: random.Random) -> None:
        """A picture, within a step of the first one."""
        planes = self.reference.frames[0][0]
        out = io.BytesIO()
        Image.fromarray(np.asarray(planes, np.uint8)[:48, :64]).convert("RGB").save(out, "png")
        fd = os.memfd_create("picture", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(fd, out.getvalue())
            fcntl.fcntl(fd, 1033, 2)
            progress, result = client.upscale(fd, {"model": VIDEO["model"]})
            with os.fdopen(result, "rb") as file:
                list(progress)
                with Image.open(file) as image:
                    got = np.asarray(image).astype(int)
        finally:
            os.close(fd)
        first = self.first.setdefault("picture", got)
        assert np.abs(got - first).max() <= 2, "another picture"
        time.sleep(0.5)

    def same(self, name: str, value: Any) -> None:
        """As the first one, as far as both go (both stop at a near tie)."""
        first = self.first.setdefault(name, value)
        for one, other in zip(first, value, strict=False):
            assert one == other, f"another {name}"

    # -- faults

    def ready(self, client: Client) -> bool:
        """Is what was struck back, and has nobody's work met too many ends of workers?"""
        devices = client.properties()["Devices"]
        now = {d["kind"]: d["generation"] for d in devices if d["state"] == "ready"}
        self._ends = sum(d["generation"] for d in devices)
        if self._hit is not None and now.get(self._hit[0], 0) <= self._hit[1]:
            return False
        self._hit = None
        return all(self._ends - since < ENDS for since in list(self._since.values()))

    def strike(self, client: Client) -> str:
        """One fault at random; its name."""
        what = self.draw.choice(["kill", "kill", "segv", "stop", "lost", "hold", "client"])
        kind = self.draw.choice(["gpu", "gpu", "cpu"])
        if what == "hold":
            fd = client.hold("the soak")
            self.stop.wait(1.0)
            os.close(fd)
            return what
        if what == "client":
            self._killed_client()
            return what
        if what == "lost":
            kind = "gpu"
        device = self.daemon.device(client, kind)
        if device.get("state") != "ready":
            return "none"
        self._hit = kind, device["generation"]
        number = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
        with contextlib.suppress(ProcessLookupError):
            os.kill(device["pid"], number.get(what, signal.SIGUSR2))
        return f"{what} {kind}"

    def _killed_client(self) -> None:
        rude = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.rude", self.daemon.address, "sit", "both"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert rude.stdin is not None
        assert rude.stdout is not None
        rude.stdin.write(json.dumps([list(asdict(self.reference.short).values())]) + "\n")
        rude.stdin.flush()
        out = rude.stdout.readline()
        rude.kill()
        rude.wait()
        rude.stdin.close()
        rude.stdout.close()
        self.add("clients killed", out == "there\n")

    def sample(self, client: Client, began: float) -> dict[str, float]:
        """What is held, and how long texts took."""
        pids = {"pvrd": self.daemon.pid}
        for device in client.properties()["Devices"]:
            if device["state"] == "ready":
                pids[device["kind"]] = device["pid"]
        out = {"s": time.monotonic() - began}
        for name, pid in pids.items():
            if size := resident(pid):
                out[f"{name} MiB"] = size / (1 << 20)
                out[f"{name} fds"] = float(sum(open_fds(pid).values()))
        with self._lock:
            if self.latency:
                out["text s"] = statistics.median(self.latency)
                self.latency.clear()
        return out


# What may drift: the rise that is let pass, as a share of the mean, and at least so much. fds of
# workers go up and down with their sessions; latency depends on whatever else the machine does.
BOUNDS = {
    "pvrd MiB": (0.05, 4.0), "gpu MiB": (0.1, 32.0), "cpu MiB": (0.1, 16.0),
    "pvrd fds": (0.1, 4.0), "gpu fds": (0.2, 6.0), "cpu fds": (0.2, 6.0), "text s": (0.5, 0.2),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calm", action="store_true", help="no faults")
    parser.add_argument("--log", help="a file for the samples")
    args = parser.parse_args()
    print(f"cpu: {common.cpu_name()}\ncommit: {common.commit()}\nseed: {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = folder / "models"
        models.mkdir()
        write_tiny(models)
        (folder / "reference").mkdir()
        reference = references(folder / "reference", models)
        (folder / "run").mkdir()
        warmed(folder / "warm", models, reference).rename(folder / "run" / "home")
        faults = ["gpu:armed", "gpu:vk_lost:1"]
        config = {**CONFIG, "deadlines.slice_s": SLICE_S, "debug.faults": faults}
        daemon = Daemon(folder / "run", models, config)
        daemon.start()
        try:
            return run(args, daemon, reference)
        finally:
            daemon.stop()


def run(args: argparse.Namespace, daemon: Daemon, reference: Reference) -> int:
    """The soak itself; the exit status."""
    soak = Soak(daemon, reference, args.seed)
    samples: list[dict[str, float]] = []
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(args.log, "w", encoding="utf-8")) if args.log else None
        client = stack.enter_context(daemon.client())
        daemon.ready(client, "gpu")
        threads = [soak.client("texts", soak.text) for _ in range(3)]
        for one in (soak.chat, soak.query, soak.video, soak.timed, soak.picture):
            threads.append(soak.client(one.__name__, one))
        for thread in threads:
            thread.start()
        began = time.monotonic()
        end = began + 60 * args.minutes
        every = max(1.0, 60 * args.minutes / 5000)
        next_fault = began + BETWEEN_S
        while (now := time.monotonic()) < end:
            soak.stop.wait(every)
            samples.append(soak.sample(client, began))
            if log is not None:
                log.write(json.dumps(samples[-1]) + "\n")
                log.flush()
            if not args.calm and now >= next_fault and soak.ready(client):
                soak.count[f"fault {soak.strike(client)}"] += 1
                next_fault = time.monotonic() + BETWEEN_S
        soak.stop.set()
        for thread in threads:
            thread.join()
    text = daemon.text()
    soak.wrong += [f"the journal has {bad!r}" for bad in ("Traceback", "fault of its own",
                   "a task failed") if bad in text]  # fmt: skip
    return report(args, soak, samples)


def report(args: argparse.Namespace, soak: Soak, samples: list[dict[str, float]]) -> int:
    """Prints what came of it; the exit status."""
    print(f"\n{args.minutes:g} minutes:")
    for name, count in sorted(soak.count.items()):
        print(f"  {name}: {count}")
    print(f"\n{'':12} {'mean':>9} {'rise':>9} {'99 % from':>10} {'to':>9}  over the run")
    drifts = []
    for name, (part, least) in BOUNDS.items():
        found = trend([s[name] for s in samples if name in s])
        bound = max(part * found.mean, least)
        drifts += [name] if found.least > bound else []
        print(f"{name:12} {found.mean:9.2f} {found.rise:9.2f} {found.least:10.2f}"
              f" {found.most:9.2f}  {'DRIFTS' if name in drifts else 'flat'}")  # fmt: skip
    print(f"\n{len(soak.wrong)} wrong or lost outputs, {len(drifts)} drifts")
    return 1 if soak.wrong or drifts else 0


if __name__ == "__main__":
    sys.exit(main())
