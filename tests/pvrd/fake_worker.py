# SPDX-License-Identifier: Apache-2.0
"""A worker that speaks the protocol and computes nothing, for tests of the daemon.

Its text is a function of the token's number alone ("w0 w1 …"), a frame's output is the input's
first byte inverted, a picture is b"FAKE" and the source. Words in a prompt make it misbehave:
`slow` (a token each 10 ms), `die:N` (ends before token N, once), `die-always:N`, `stop:N` (SIGSTOP
before token N, once), `nonsense:N` (a datagram that is no JSON, once), `suspect:N` (doubts the
two tokens before token N), `wide` (long text), `cut` (no whole answer to a schema), `canary:N` (the
GPU's slices take N times as long as alone), `late` (the GPU begins with it when it is to leave) and
`oom:gpu`.
Once means in the first generation of the GPU worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

from pvrd.workers import protocol

AHEAD = protocol.MAX_AHEAD


class Gone(Exception):
    """pvrd closed the socket."""


class Text:
    """A text job."""

    def __init__(self, message: Mapping[str, Any], journal: int) -> None:
        raw = b""
        while piece := os.pread(journal, 1 << 20, len(raw)):
            raw += piece
        line, _, rest = raw.partition(b"\n")
        assert len(line) + 1 == message["header_bytes"]
        header = json.loads(line)
        last = header.get("messages") or [{"content": header.get("prompt")}]
        self.prompt = str(last[-1]["content"])
        self.settings = header["settings"]
        self.job = message["job"]
        self.next = self.acked = int(message["delivered"])
        assert len(rest) == 4 * self.next, "the journal has what pvrd recorded"
        for n in range(self.next):
            assert int.from_bytes(rest[4 * n : 4 * n + 4], "little") == token(n)
        self.started = False

    def at(self, word: str) -> int | None:
        match = re.search(rf"(?:^|\s){word}:(\d+)", self.prompt)
        return int(match[1]) if match else None


def token(n: int) -> int:
    return 100 + 7 * n


class Fake:
    """The loop."""

    def __init__(self, sock: socket.socket, kind: str, absent: str, slow_load: float) -> None:
        self.sock = sock
        self.kind = kind
        self.absent = absent
        self.slow_load = slow_load
        self.texts: dict[str, Text] = {}
        self.videos: dict[str, tuple[dict[str, Any], mmap.mmap]] = {}
        self.frames = 0
        self.generation = 0
        self.parked = False

    def send(self, **message: Any) -> None:
        protocol.send(self.sock, message)

    def run(self) -> None:
        while True:
            runnable = [t for t in self.texts.values() if t.next - t.acked < AHEAD]
            if self.parked:
                runnable = []
            if self.kind == "gpu":
                runnable = [t for t in runnable if "late" not in t.prompt.split()]
            ready, _, _ = select.select([self.sock], [], [], 0 if runnable else None)
            if ready:
                received = protocol.recv(self.sock)
                if received is None:
                    raise Gone
                try:
                    self.handle(received.message, received)
                finally:
                    received.close()
            elif runnable:
                self.step(runnable[0])

    def step(self, job: Text) -> None:
        if not job.started:
            job.started = True
            self.send(t="text.start", job=job.job, prompt_tokens=len(job.prompt.split()),
                      context=job.settings["context"])  # fmt: skip
        if job.next >= job.settings["max_tokens"]:
            stats = {"prefill_s": 0.5, "prefill_tokens": 3, "decode_tokens": job.next}
            whole = job.settings["schema"] and "cut" not in job.prompt
            self.send(t="text.end", job=job.job, reason="stop" if whole else "length", text="end",
                      stats=stats)  # fmt: skip
            del self.texts[job.job]
            return
        once = self.kind == "gpu" and self.generation == 1
        if job.at("die-always") == job.next or (once and job.at("die") == job.next):
            os._exit(9)
        if once and job.at("stop") == job.next:
            os.kill(os.getpid(), signal.SIGSTOP)
        if once and job.at("nonsense") == job.next:
            self.sock.send(b"\xff\xfe no JSON")
        if job.at("suspect") == job.next:
            self.send(t="quarantine", kernels={"matvec.q4": "half of y was wrong"})
            self.send(t="text.suspect", job=job.job, since=job.next - 2, kernel="matvec.q4",
                      reason="half of y was wrong")  # fmt: skip
        if self.kind == "gpu" and (ratio := job.at("canary")) is not None:
            self.send(t="canary", ratio=ratio, busy=0.9, slices=10)
        if "slow" in job.prompt:
            time.sleep(0.01)
        text = f"w{job.next} " + ("é\x01" * 1500 if "wide" in job.prompt else "")
        extra: dict[str, Any] = {"top5": [[token(job.next), 1.5]]} if job.settings["top5"] else {}
        if job.settings["logprobs"]:
            extra |= {"logprob": -0.5, "logprobs": [[token(job.next), -0.5], [1, -1.5]]}
        self.send(t="text.token", job=job.job, n=job.next, id=token(job.next), text=text, **extra)
        job.next += 1

    def handle(self, m: dict[str, Any], received: protocol.Received) -> None:
        kind = m["t"]
        if kind == "hello":
            self.generation = m["generation"]
            device = {
                "kind": self.kind, "name": f"Fake {self.kind}", "driver": "fake",
                "software": self.kind == "cpu", "features": ["fp16"],
                "limits": {"max_storage_range": 1 << 27}, "properties": {"node": "none"},
            }  # fmt: skip
            if self.kind == "gpu" and self.absent:
                self.send(t="hello", protocol=1, pid=os.getpid(), device=None,
                          reason="there is no render node", code=self.absent)  # fmt: skip
            else:
                self.send(t="hello", protocol=1, pid=os.getpid(), device=device, reason="", code="")
        elif kind == "govern":
            self.parked = m["parked"]
        elif kind == "prepare":
            wished = m["session"], m["model"], m["context"], m["kv"], m["priority"]
            print("prepare", *wished, file=sys.stderr, flush=True)
        elif kind == "ping":
            self.send(t="pong", n=m["n"])
        elif kind == "load":
            fd = received.take()
            head = os.read(fd, 64)
            os.close(fd)
            assert not m.get("narrow") or (b"wide" in head and m["cache"].endswith("-q4.pvrm"))
            assert m["model"].endswith("-q4") == bool(m.get("narrow"))
            self.send(t="progress", model=m["model"], value=0.5)
            time.sleep(self.slow_load)
            if head.startswith((b"GGUF", b"PVRM")):
                self.send(t="loaded", model=m["model"], info={"arch": "fake", "context": 4096})
            else:
                self.send(t="error", model=m["model"], error="BadModel", message="no model")
        elif kind == "inspect":
            fd = received.take()
            if os.pread(fd, 64, 0) == b"GGUF hang":
                print("asked", m["job"], file=sys.stderr, flush=True)
            elif os.pread(fd, 4, 0) == b"GGUF":
                narrows = b"wide" in os.pread(fd, 64, 0)
                info = {"kind": "text", "arch": "fake", "licence": "none", "narrows": narrows}
                self.send(t="inspected", job=m["job"], info=info)
            else:
                self.send(t="error", job=m["job"], error="BadModel", message="this is no model")
            os.close(fd)
        elif kind == "text":
            fd = received.take()
            job = Text(m, fd)
            os.close(fd)
            if m.get("carried"):
                assert os.pread(received.fd(), 100, 0) == b"caches", "sealed, as it was written"
            if self.kind == "gpu" and "oom:gpu" in job.prompt:
                self.send(t="error", job=job.job, error="OutOfMemory", message="needs 9 of 8 bytes")
            else:
                self.texts[job.job] = job
        elif kind == "text.export" and m["job"] in self.texts:
            leaves = self.texts.pop(m["job"])
            if not leaves.started:
                self.send(t="text.start", job=m["job"], prompt_tokens=1, context=64)
            self.send(t="text.exported", job=m["job"], bytes=os.pwrite(received.fd(), b"caches", 0))
        elif kind == "ack" and m["job"] in self.texts:
            self.texts[m["job"]].acked = max(self.texts[m["job"]].acked, m["n"])
        elif kind == "cancel":
            print("cancelled", m["job"], file=sys.stderr, flush=True)
            self.texts.pop(m["job"], None)
        elif kind == "count":
            text = m.get("text", "")
            if received.fds:
                text = os.pread(received.fds[0], 1 << 24, 0).decode()
            if text == "hang":
                print("asked", m["job"], file=sys.stderr, flush=True)
            else:
                self.send(t="count", job=m["job"], tokens=len(text.split()))
        elif kind == "video.open":
            fd = received.take()
            ring = mmap.mmap(fd, 0)
            os.close(fd)
            self.videos[m["session"]] = (m["layout"], ring)
            asked = "int8" if m["precision"] == "model" else m["precision"]
            used = "f32" if self.kind == "gpu" else asked
            self.send(t="video.ready", session=m["session"], tiles=4, precision=used)
        elif kind == "frame":
            self.frame(m)
        elif kind == "close":
            self.videos.pop(m["session"], None)
        elif kind == "picture":
            source, result = received.take(), received.take()
            if os.pread(source, 4, 0) == b"hang":
                print("asked", m["job"], file=sys.stderr, flush=True)
                return
            self.send(t="picture.progress", job=m["job"], done=1, total=2)
            os.pwrite(result, b"FAKE" + os.pread(source, 1 << 24, 0), 0)
            self.send(t="picture.done", job=m["job"], width=4, height=2, bytes=0, format="png",
                      stats={"tiles": 2, "tiles_fallback": 0})  # fmt: skip
            os.close(source)
            os.close(result)
        elif kind == "query":
            question, result = received.take(), received.take()
            asked = json.loads(os.pread(question, 1 << 20, 0))
            if "hang" in asked.get("texts", asked.get("labels")):
                print("asked", m["job"], file=sys.stderr, flush=True)
                return
            if m["kind"] == "embed":
                data = struct.pack("<2f", 0.6, 0.8) * len(asked["texts"])
                told: dict[str, Any] = {"width": 2}
            else:
                data = json.dumps(dict.fromkeys(asked["labels"], 0.5)).encode()
                told = {"best": asked["labels"][-1]}
            os.pwrite(result, data, 0)
            self.send(t="query.done", job=m["job"], bytes=len(data), tokens=1, **told)
            os.close(question)
            os.close(result)
        elif kind == "trace":
            if not m["on"]:
                begun = time.monotonic_ns() // 1000
                events = [["slice", begun, 1500, "j1", "text", 5],
                          ["run", begun, 1400, "decode+head", 1, 1000], ["nonsense"]]  # fmt: skip
                self.send(t="trace", job=m["job"], events=events)
                self.send(t="trace.done", job=m["job"])
        elif kind == "stats":
            self.send(t="stats", counters={"submissions": 5}, rss=12345, jobs=len(self.texts),
                      times={"compute": 2.5, "queue": 1})  # fmt: skip

    def frame(self, m: dict[str, Any]) -> None:
        layout, ring = self.videos[m["session"]]
        base = m["slot"] * layout["slot_bytes"]
        source = ring[base]
        self.frames += 1
        once = self.kind == "gpu" and self.generation == 1
        if once and source == 66:
            os._exit(9)
        if once and source == 65:
            os.kill(os.getpid(), signal.SIGSTOP)
        if source == 67:
            os._exit(9)
        if source == 69 and self.kind == "gpu":
            self.send(t="error", session=m["session"], error="DeviceLost", message="conv is wrong")
            return
        ring[base + layout["out"]["planes"][0]["offset"]] = source ^ 0xFF
        fallback = 1 if source == 68 else 0
        self.send(t="frame.done", session=m["session"], seq=m["seq"], slot=m["slot"],
                  level=m["level"],
                  status=fallback, ms=1.5, tiles=4, tiles_fallback=fallback,
                  times={"compute": 1.25, "queue": 0.5, "upload": 6, "nonsense": "x"})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--absent", default="")
    parser.add_argument("--slow-load", type=float, default=0.0)
    parser.add_argument("--dumb", action="store_true", help="never says hello")
    args = parser.parse_args()
    with socket.socket(fileno=args.fd) as sock:
        if args.dumb and args.kind == "gpu":
            while sock.recv(1):
                pass
            return
        with contextlib.suppress(Gone, BrokenPipeError, ConnectionResetError):
            Fake(sock, args.kind, args.absent, args.slow_load).run()


if __name__ == "__main__":
    main()
