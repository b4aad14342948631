# SPDX-License-Identifier: Apache-2.0
"""What goes on while a fault happens: texts and videos of one client, followed line by line.

Neither the engine nor pytest is imported: the ill-behaved clients (rude.py) start fast.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pvrd.client import Client, TextSession, options
from pvrd.client_video import Done, VideoSession
from pvrd.errors import PvrdError

WIDTH, HEIGHT, FRAMES, SLOTS = 96, 64, 10, 3
VIDEO = {"width": WIDTH, "height": HEIGHT, "model": "nsr-fast", "slots": SLOTS}
CONTEXT = 256
EOS = 2  # the token of the model that ends an answer
WAIT_S = 90.0  # ends a broken test


@dataclass(frozen=True)
class Ask:
    """A text: a prompt, how many tokens."""

    prompt: str
    tokens: int


@dataclass(frozen=True)
class State:
    """What is under way when the fault comes: `begun` is the moment to strike."""

    name: str
    texts: int = 0
    long: bool = False  # prompts of 150 tokens
    video: bool = False
    running: bool = True  # or else sessions are open and nothing runs


STATES = (
    State("idle", texts=1, video=True, running=False),
    State("prefill", texts=1, long=True),
    State("decode", texts=1),
    State("batch of 8", texts=8),
    State("video", video=True),
    State("both", texts=1, video=True),
)
BY_NAME = {state.name: state for state in STATES}


def frame(seq: int) -> list[np.ndarray]:
    """The planes of a frame, samples uint8, that differs from all others."""
    out = []
    for i, (w, h) in enumerate([(WIDTH, HEIGHT), (WIDTH // 2, HEIGHT // 2)] * 2):
        y, x = np.mgrid[:h, :w]
        out.append(128 + 90 * np.sin((x + 7 * seq) / (5 + i)) * np.cos((y - seq) / 6))
    return [plane.astype(np.uint8) for plane in (out[0], out[1], out[3])]


class Text:
    """One answer, as its lines come."""

    def __init__(self, client: Client, ask: Ask, device: str) -> None:
        self.ask = ask
        settings = {"model": "tiny", "context": CONTEXT, "device": device}
        self.session: TextSession = client.open_text(settings)
        self.fd = -1
        self.events: list[dict[str, Any]] = []
        self.at: list[float] = []  # when each came
        self.ended = 0.0  # when the end of the file came
        self._buffer = b""

    def start(self, **more: Any) -> None:
        """Asks for the answer."""
        settings = options({"max_tokens": self.ask.tokens, **more})
        reply = self.session.call("Generate", "sa{sv}", [self.ask.prompt, settings])
        self.fd = reply.fds.take(reply.body[0])

    @property
    def over(self) -> bool:
        """Has the end of the file come?"""
        return self.ended > 0

    @property
    def ids(self) -> list[int]:
        """The tokens, after a look at the numbers: each once, in order."""
        found = [e for e in self.events if e["type"] == "token" and "id" in e]
        assert [e["n"] for e in found] == list(range(len(found))), "a token was lost or doubled"
        assert [e["seq"] for e in self.events] == list(range(len(self.events))), "a line was lost"
        return [e["id"] for e in found]

    def take(self) -> None:
        """Reads what is there."""
        piece = os.read(self.fd, 65536)
        now = time.monotonic()
        if not piece:
            assert not self._buffer, "a torn line"
            self.ended = now
            os.close(self.fd)
            self.fd = -1
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        for line in lines:
            self.events.append(json.loads(line))
            self.at.append(now)

    def close(self) -> None:
        """Lets go of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.session.close()


class Video:
    """Frames through a session, each compared as it comes."""

    def __init__(self, client: Client, device: str, wanted: list[list[np.ndarray]] | None) -> None:
        self.video: VideoSession = client.open_video({**VIDEO, "device": device})
        self.wanted = wanted
        self.done: list[Done] = []
        self.at: list[float] = []
        self.ended = 0.0
        self.started = False
        self._free = list(range(self.video.slots))
        self._sent = 0

    def start(self) -> None:
        """Sends as many frames as there are slots."""
        self.started = True
        self._send()

    def _send(self) -> None:
        while self._sent < FRAMES and self._free and self.video.credits and not self.ended:
            slot = self._free.pop(0)
            for pieces, plane in zip(self.video.input(slot), frame(self._sent), strict=True):
                flat, at = np.ascontiguousarray(plane).reshape(-1), 0
                for piece in pieces:
                    piece[:] = memoryview(flat[at : at + len(piece)])
                    at += len(piece)
            self.video.submit(self._sent, slot, pts=1000 + self._sent)
            self._sent += 1

    @property
    def over(self) -> bool:
        """Have all frames come, or the end?"""
        return len(self.done) == FRAMES or self.ended > 0

    def take(self) -> None:
        """Takes in one message."""
        try:
            done = self.video.receive()
            if done is not None:
                self._look(done)
            if self.started:
                self._send()
        except (PvrdError, OSError):
            self.ended = time.monotonic()

    def _look(self, done: Done) -> None:
        assert (done.seq, done.pts) == (len(self.done), 1000 + done.seq), "a frame is out of order"
        assert not any((done.dropped, done.degraded, done.tiles_fallback)), done
        if self.wanted is not None:
            for pieces, plane in zip(
                self.video.output(done.slot), self.wanted[done.seq], strict=True
            ):
                got = np.frombuffer(b"".join(pieces), np.uint8).reshape(plane.shape)
                worst = int(np.abs(got.astype(int) - plane).max())
                assert worst <= 1, f"frame {done.seq} differs by {worst}"
        self.done.append(done)
        self.at.append(time.monotonic())
        self._free.append(done.slot)

    def close(self) -> None:
        """Lets go of it."""
        self.video.close()


@dataclass
class Work:
    """The texts and the video of a state, by one client."""

    client: Client
    state: State
    asks: list[Ask]
    device: str = "auto"
    frames: list[list[np.ndarray]] | None = None
    texts: list[Text] = field(default_factory=list)
    videos: list[Video] = field(default_factory=list)

    def open(self) -> None:
        """Opens the sessions and waits until they are ready."""
        for ask in self.asks[: self.state.texts]:
            self.texts.append(Text(self.client, ask, self.device))
        if self.state.video:
            self.videos.append(Video(self.client, self.device, self.frames))
        for session in [t.session for t in self.texts] + [v.video.session for v in self.videos]:
            end = time.monotonic() + WAIT_S
            while not (told := session.properties())["Ready"]:
                assert not told["Error"], told["Error"]
                assert time.monotonic() < end, "the session does not become ready"
                select.select([], [], [], 0.02)
        for video in self.videos:
            while not video.video.credits:
                video.take()

    def start(self, **more: Any) -> None:
        """Begins with all of it."""
        for text in self.texts:
            text.start(**more)
        for video in self.videos:
            video.start()

    def begun(self) -> bool:
        """Is everything in the middle?"""
        if self.state.long:
            return bool(self.texts[0].events)  # the prompt is being read, no token is there
        return all(len(t.events) >= 5 for t in self.texts) and all(
            len(v.done) >= 3 for v in self.videos
        )

    def over(self) -> bool:
        """Is everything at its end?"""
        return all(t.over for t in self.texts) and all(v.over for v in self.videos)

    def follow(self, until: Callable[[], bool], seconds: float = WAIT_S) -> None:
        """Reads whatever comes until it is so."""
        end = time.monotonic() + seconds
        while not until():
            fds: dict[int, Text | Video] = {t.fd: t for t in self.texts if t.fd >= 0}
            fds |= {v.video.fileno(): v for v in self.videos if not v.ended}
            left = end - time.monotonic()
            assert left > 0, f"nothing more came in {seconds:g} s: {self.told()}"
            for fd in select.select(list(fds), [], [], min(left, 1.0))[0]:
                fds[fd].take()
                end = time.monotonic() + seconds

    def told(self) -> str:
        """Where it stands."""
        texts = [f"{len(t.events)} lines, last {t.events[-1:]}" for t in self.texts]
        return "; ".join([*texts, *(f"{len(v.done)} frames" for v in self.videos)])

    def check(self, ids: Mapping[Ask, list[int]]) -> None:
        """All of it came, right."""
        for text in self.texts:
            last = text.events[-1]
            assert last["type"] == "end", last
            assert text.ids == ids[text.ask][: text.ask.tokens], "other tokens than undisturbed"
            ended = text.ids[-1:] == [EOS]
            assert last["reason"] == ("stop" if ended else "length"), last
        for video in self.videos:
            assert len(video.done) == FRAMES

    def next_after(self, moment: float) -> float:
        """When every stream had something new after the moment: how long after it."""
        waits = [0.0]
        for text in self.texts:
            came = [
                at for e, at in zip(text.events, text.at, strict=True)
                if e["type"] in ("token", "end") and at > moment
            ]  # fmt: skip
            waits += [came[0] - moment] if came else []
        for video in self.videos:
            came = [at for at in video.at if at > moment]
            waits += [came[0] - moment] if came else []
        return max(waits)

    def close(self) -> None:
        """Closes the sessions."""
        for text in self.texts:
            text.close()
        for video in self.videos:
            video.close()
        self.texts.clear()
        self.videos.clear()
