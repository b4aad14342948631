# SPDX-License-Identifier: Apache-2.0
"""Many clients at once against one: tokens/s, waiting times, fairness, memory, and who is refused.

    python -m benchmarks.load [--quick] [--json] [--clients 200] [--sessions 64] [--model NAME]

A pvrd of its own on a bus of its own, on the CPU, with a model of 100,000 weights unless one is
named: what is measured is what pvrd costs, not the model. Every answer is compared with the one
that a single client got. Rows `N sessions`: each has an answer written, again and again, for some
seconds. `200 clients`: all ask at the same moment, more than the quotas let in; who is refused
(QuotaExceeded, Busy) asks again later, until each has its answer. The peer is one client. `first`
is the time from asking to the first token, `gap` that between two tokens; p99 is of all of them.
Jain's index of the sessions' tokens is 1 when all got the same, 1/N when one got all
(R. Jain et al., DEC-TR-301, 1984).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from pvrd.client import Client, TextSession, options
from pvrd.errors import Busy, PvrdError, QuotaExceeded
from tests.daemons import PROMPT, write_tiny
from tests.faults.daemon import Daemon, open_fds, resident

TOKENS, CONTEXT = 16, 64
SLOW = 4  # sessions of a crowd that do not read, of the eight that a worker serves together
F_SETPIPE_SZ = 1031
WAIT_S = 300.0
MIB = 1 << 20


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness."""
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def p99(times: Sequence[float]) -> float:
    """The 99th of 100, in milliseconds."""
    return 1000 * sorted(times)[min(len(times) - 1, int(0.99 * len(times)))] if times else 0.0


@dataclass
class Asker:
    """A client with a session of its own that asks again and again."""

    client: Client
    session: TextSession | None = None
    fd: int = -1
    asked: float = 0.0
    again: float = 0.0  # when to try again
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    answers: int = 0
    refused: int = 0
    refusals: list[float] = field(default_factory=list)  # how long the word of refusal took
    ids: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _last: float = 0.0
    _buffer: bytes = b""

    def ask(self, model: str, prompt: str, deaf: bool = False) -> bool:
        """Asks for an answer; False when there is no room, to be asked again. `deaf`: for one of
        more bytes than its pipe has room for, which nobody will read.
        """
        began = time.monotonic()
        self.asked = self.asked or began
        try:
            if self.session is None:
                self.session = self.client.open_text({"model": model, "context": CONTEXT})
            given = options({"max_tokens": 2 * TOKENS if deaf else TOKENS, "top5": deaf})
            reply = self.session.call("Generate", "sa{sv}", [prompt, given])
        except (Busy, QuotaExceeded):
            self.refused += 1
            self.refusals.append(time.monotonic() - began)
            self.again = time.monotonic() + 0.05 * min(self.refused, 8)
            return False
        self.fd = reply.fds.take(reply.body[0])
        if deaf:
            fcntl.fcntl(self.fd, F_SETPIPE_SZ, select.PIPE_BUF)
        self.ids = []
        self._last = 0.0
        return True

    def take(self, wanted: Sequence[int]) -> bool:
        """Reads what is there; True at the end of an answer."""
        piece = os.read(self.fd, 1 << 16)
        now = time.monotonic()
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["type"] == "token" and "id" in event:
                (self.gaps if self._last else self.first).append(now - (self._last or self.asked))
                self._last = now
                self.ids.append(event["id"])
                self.tokens += 1
            elif event["type"] == "error":
                self.errors.append(f"{event['error']}: {event['message']}")
        if piece:
            return False
        os.close(self.fd)
        self.fd, self.asked = -1, 0.0
        if self.ids != list(wanted) and not self.errors:
            self.errors.append("another answer than a single client got")
        self.answers += 1
        return True

    def close(self) -> None:
        """Leaves the bus."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.client.close()


@dataclass
class Crowd:
    """So many clients at work for a while."""

    askers: list[Asker]
    seconds: float
    rss: int  # bytes that pvrd grew by
    fds: int  # more of pvrd's than before, when all had left

    @property
    def tokens_s(self) -> float:
        return sum(a.tokens for a in self.askers) / self.seconds

    @property
    def first(self) -> float:
        return p99([t for a in self.askers for t in a.first])

    @property
    def gap(self) -> float:
        return p99([t for a in self.askers for t in a.gaps])

    @property
    def fair(self) -> float:
        return jain([a.tokens for a in self.askers])


class Place:
    """The daemon under load."""

    def __init__(self, daemon: Daemon, model: str) -> None:
        self.daemon, self.model = daemon, model
        self.prompt = PROMPT
        self.wanted: list[int] = []

    def crowd(
        self, count: int, seconds: float, slow: int = 0, once: bool = False
    ) -> Crowd:
        """`count` clients for some seconds, or until each has one answer; `slow` more do not read.

        Raises:
            SystemExit: an answer was wrong or lost, or fds stayed.
        """
        pid = self.daemon.pid
        before, fds = resident(pid), sum(open_fds(pid).values())
        most = before
        with contextlib.ExitStack() as stack:
            def asker() -> Asker:
                made = Asker(Client(self.daemon.address))
                stack.callback(made.close)
                return made

            deaf = [asker() for _ in range(slow)]
            for one in deaf:
                one.ask(self.model, self.prompt, deaf=True)
            askers = [asker() for _ in range(count)]
            if not once:
                for one in askers:  # the session, and what is compiled for it
                    one.ask(self.model, self.prompt)
                self._follow(askers, lambda: all(a.answers for a in askers), again=False)
                for one in askers:
                    one.first, one.gaps, one.tokens, one.answers = [], [], 0, 0
            began = time.monotonic()
            end = began + (WAIT_S if once else seconds)
            while time.monotonic() < end:
                if once and all(a.answers for a in askers):
                    break
                self._turn(askers, end, once)
                most = max(most, resident(pid))
            took = time.monotonic() - began
            if errors := [e for a in askers for e in a.errors]:
                raise SystemExit(f"{len(errors)} answers failed, the first: {errors[0]}")
            if once and not all(a.answers for a in askers):
                raise SystemExit("not every client got its answer")
        left = self._left(pid, fds)
        if left > 0:
            raise SystemExit(f"{left} file descriptors of pvrd stayed open")
        return Crowd(askers, took, most - before, left)

    def _turn(self, askers: list[Asker], end: float, once: bool) -> None:
        """Asks where nobody waits for an answer, reads what came."""
        now = time.monotonic()
        for one in askers:
            if one.fd < 0 and now >= one.again and not (once and one.answers):
                one.ask(self.model, self.prompt)
        self._read(askers, min(end, now + 0.05), once)

    def _read(self, askers: list[Asker], until: float, leave: bool) -> None:
        fds = {a.fd: a for a in askers if a.fd >= 0}
        pause = max(0.0, until - time.monotonic())
        for fd in select.select(list(fds), [], [], pause)[0]:
            one = fds[fd]
            if one.take(self.wanted or one.ids) and leave and one.session is not None:
                one.session.close()  # room for the next one

    def _follow(self, askers: list[Asker], done: Callable[[], bool], again: bool) -> None:
        end = time.monotonic() + WAIT_S
        while not done():
            if time.monotonic() > end:
                raise SystemExit("the answers do not come")
            now = time.monotonic()
            for one in askers:
                if one.fd < 0 and not one.answers and now >= one.again:
                    one.ask(self.model, self.prompt)
            self._read(askers, now + 0.05, again)

    @staticmethod
    def _left(pid: int, before: int) -> int:
        end = time.monotonic() + 20
        while (more := sum(open_fds(pid).values()) - before) > 0 and time.monotonic() < end:
            time.sleep(0.02)
        return more


@contextlib.contextmanager
def place(args: argparse.Namespace) -> Iterator[Place]:
    """A daemon with the quotas of this benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        models.mkdir()
        write_tiny(models)
        config: dict[str, Any] = {
            "gpu.enabled": False, "governor.enabled": False, "cpu.threads": args.threads,
            "limits.sessions": args.sessions + SLOW,
            "limits.queue": max(args.sessions, min(8, args.sessions) + SLOW),
            "limits.slow_reader_s": 600.0,
        }  # fmt: skip
        daemon = Daemon(Path(folder), models, config)
        daemon.start()
        try:
            with daemon.client() as client:
                daemon.ready(client, "cpu")
            yield Place(daemon, args.model)
        finally:
            daemon.stop()


def measure(args: argparse.Namespace) -> list[common.Row]:
    seconds = args.seconds or (3.0 if args.quick else 20.0)
    rows = []
    with place(args) as where:
        single = Asker(Client(where.daemon.address))
        single.ask(where.model, where.prompt)
        where._follow([single], lambda: single.answers == 1, again=False)
        where.wanted = list(single.ids)
        single.close()
        one = where.crowd(1, seconds)
        for count in sorted({min(8, args.sessions), args.sessions}):
            many = where.crowd(count, seconds * (1 if count <= 8 else 3))  # many answers for each
            rows += compared(f"{count} sessions", many, one)
        # Jobs that are parked keep their places, of which a worker has eight.
        few = min(8, args.sessions)
        slow = where.crowd(few, seconds, slow=SLOW)
        rows += compared(f"{few} sessions, {SLOW} more read nothing", slow, one)
        burst = where.crowd(args.clients, seconds, once=True)
        rows += compared(f"{args.clients} clients at once", burst, one, burst=True)
    return rows


def compared(name: str, many: Crowd, one: Crowd, burst: bool = False) -> list[common.Row]:
    """A crowd beside one client."""
    peer = "one client"
    rows = [
        common.row(f"{name}: tokens", "tokens/s", many.tokens_s, one.tokens_s, peer),
        common.row(f"{name}: first, p99", "ms", many.first, one.first, peer),
        common.row(f"{name}: gap, p99", "ms", many.gap, one.gap, peer),
        common.row(f"{name}: Jain's index", "of 1", many.fair, None, "-"),
        common.row(f"{name}: pvrd grows", "MiB", many.rss / MIB, None, "-"),
    ]
    if burst:
        refusals = [t for a in many.askers for t in a.refusals]
        rows += [
            common.row(f"{name}: refused", "times", len(refusals), None, "-"),
            common.row(f"{name}: until told so, p99", "ms", p99(refusals), None, "-"),
            common.row(f"{name}: all served", "s", many.seconds, None, "-"),
        ]
    return rows


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.0, help="of a row; 64 sessions: thrice")
    parser.add_argument("--model", default="tiny", help="a text model of this machine's pvrd")


if __name__ == "__main__":
    try:
        sys.exit(common.main(__doc__ or "", measure, _options))
    except PvrdError as e:
        raise SystemExit(f"{e.name}: {e}") from None
