# SPDX-License-Identifier: Apache-2.0
"""Targets: whole sessions, both fd protocols, between a client and two workers that do what a list
of events (JSON) says. What is around them: tests/fuzz/world.py.

    text    ["tokens", K]          the worker writes K tokens more
            ["read", K]            the client reads up to K bytes
            ["gone"] ["cancel"]    the client closes its end, or calls Cancel
    video   ["submit", SEQ, SLOT, MS]   a frame; MS: of its deadline from now, 0 for none
            ["raw", HEX]           a datagram of the client's
            ["done", KIND, K, {…}] a worker answers the K-th frame that it holds; more fields
            ["pause", BOOL]
    both    ["word", KIND, {…}]    a worker says this, whatever it is
            ["end", KIND]          a worker dies
            ["close"]              the client closes the session
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

from tests.fuzz.world import KINDS, Finding, World, settings

EVENTS = 60
WIDTH, HEIGHT, SLOTS = 16, 8, 3


def events(data: bytes) -> list[list[Any]]:
    """The events of an input; what is none is left out."""
    try:
        found = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return []
    found = found if isinstance(found, list) else []
    return [e for e in found if isinstance(e, list) and e and isinstance(e[0], str)][:EVENTS]


def number(event: list[Any], at: int, most: int) -> int:
    """A number of an event, 0 to `most`."""
    value = event[at] if len(event) > at else 0
    return max(0, min(value, most)) if type(value) is int else 0


def kind_of(event: list[Any]) -> str:
    return event[1] if len(event) > 1 and event[1] in KINDS else "gpu"


def fields(event: list[Any], at: int) -> dict[str, Any]:
    return event[at] if len(event) > at and isinstance(event[at], dict) else {}


Play = Callable[[World, list[list[Any]]], Coroutine[Any, Any, None]]


def played(play: Play, data: bytes) -> None:
    """Plays the events of an input.

    Raises:
        Finding: a rule is broken, something of pvrd's failed unseen, or an fd is left.
    """
    from pvrd import beside, link, systemd

    settings()
    faults: list[str] = []

    def log(level: int, message: str, **more: str) -> None:
        if message.startswith("a task failed"):
            faults.append(message)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: faults.append(str(context.get("exception", context["message"])))
        )
        world = World()
        with (
            mock.patch.object(link, "spawn", world.spawn),
            mock.patch.object(systemd, "log", log),
            mock.patch.object(beside, "put", lambda lane, work: work()),  # the same turns each time
        ):
            world.core.supervisor.start()
            await world.until(lambda: len(world.ends) == 2, "both workers")
            await play(world, events(data))
            await world.over()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(run())
    if faults:
        raise Finding("; ".join(faults))
    if (after := len(os.listdir("/proc/self/fd"))) != before:
        raise Finding(f"{after - before} file descriptors are left")


# -- text


def common(world: World, session: Any, event: list[Any]) -> None:
    """Events of both kinds of sessions."""
    if event[0] == "word":
        names = {"session": session.id} | world.jobs.get(kind_of(event), {})
        world.say(kind_of(event), {"t": "pong", **names, **fields(event, 2)})
    elif event[0] == "end":
        world.die(kind_of(event))
    elif event[0] == "close":
        session.close()


def write(world: World, count: int) -> None:
    """Tokens of the worker that writes."""
    for kind, job in world.jobs.items():
        for _ in range(count):
            n = job["n"]
            job["n"] += 1
            token = {"t": "text.token", "job": job["job"], "n": n, "id": n, "text": f"w{n} "}
            world.say(kind, token)


async def play_text(world: World, given: list[list[Any]]) -> None:
    from pvrd import options
    from pvrd.text_session import TextSession

    chosen = options.parse({}, options.TEXT_SESSION)
    world.core.peers.take(0, 1)
    session = TextSession(world.core, ":1.2", 0, world.model, chosen)
    session.open()
    call: Any = None
    answer = await session.generate(call, "w1", {})
    fd, answer.fds[:] = answer.fds[0], []
    os.set_blocking(fd, False)
    said, lied, left = bytearray(), False, False

    def read(most: int) -> bool:
        with contextlib.suppress(BlockingIOError):
            piece = os.read(fd, most) if fd >= 0 and most else b"x"
            said.extend(piece if fd >= 0 and most else b"")
            return piece == b""
        return False

    try:
        for event in given:
            await world.turns()
            if event[0] == "tokens":
                write(world, number(event, 1, 16))
            elif event[0] == "read":
                read(number(event, 1, 1 << 16))
            elif event[0] == "gone" and not left:
                left = True
                os.close(fd)
                fd = -1
            elif event[0] == "cancel":
                await session.cancel(call)
            else:
                lied = lied or event[0] == "word"
                common(world, session, event)
        if left:
            await world.until(lambda: session.job is None, "the end of a job without a reader")
        ended = left
        while not ended:
            for kind, job in list(world.jobs.items()):
                write(world, 1)
                world.say(kind, {"t": "text.end", "job": job["job"], "reason": "stop", "text": ""})
                del world.jobs[kind]
            if session.job is None:
                await world.until(lambda: read(1 << 16), "the end of the stream")
                ended = True
            else:
                await world.turns(2)
                await asyncio.sleep(0.001)
                ended = read(1 << 16)
    finally:
        if fd >= 0:
            os.close(fd)
    session.close()
    if not left:
        check_lines(bytes(said), lied)


def check_lines(said: bytes, lied: bool) -> None:
    """A stream's lines; of one that was read to its end."""
    if said[-1:] != b"\n":
        raise Finding("the stream ends in a line")
    lines = [json.loads(line) for line in said.decode().splitlines()]
    if any(len(line) >= 4096 for line in said.split(b"\n")):
        raise Finding("a line is too long")
    if [line["seq"] for line in lines] != list(range(len(lines))):
        raise Finding("lines are lost or doubled")
    last = [line["type"] in ("end", "error") for line in lines]
    if last != [False] * (len(lines) - 1) + [True]:
        raise Finding("it has not one end")
    ids = [line["n"] for line in lines if line["type"] == "token" and "id" in line]
    if ids != list(range(len(ids))):
        raise Finding(f"tokens are lost or doubled: {ids}")
    if not lied and any("id" in line and line["id"] != line["n"] for line in lines):
        raise Finding("another token")


# -- video


async def play_video(world: World, given: list[list[Any]]) -> None:
    from pvrd import options
    from pvrd.slot_socket import CREDIT, DONE, DROP, ERROR, SUBMIT, SlotMessage
    from pvrd.video_layout import plan
    from pvrd.video_session import VideoSession

    size = {"width": WIDTH, "height": HEIGHT, "slots": SLOTS}
    chosen = options.parse(size, options.VIDEO_SESSION)
    layout = plan(chosen, 1 << 24)
    world.core.peers.take(0, 1, layout.ring_bytes, 3)
    session = VideoSession(world.core, ":1.2", 0, [world.film], chosen, layout)
    session.fds = 3
    session.open()
    answer = session.answer()
    os.close(answer.fds[0])
    client = socket.socket(fileno=answer.fds[1])
    client.setblocking(False)
    answer.fds.clear()
    got: list[SlotMessage] = []
    asked: list[int] = []
    state = {"ended": False, "lied": False}

    def read() -> bool:
        while not state["ended"]:
            try:
                data = client.recv(4096)
            except BlockingIOError:
                return False
            except OSError:
                data = b""
            if data:
                got.append(SlotMessage.unpack(data))
            else:
                state["ended"] = True
        return True

    def send(data: bytes) -> None:
        with contextlib.suppress(OSError):
            client.send(data)

    def done(kind: str, at: int, more: dict[str, Any]) -> None:
        if held := world.frames[kind]:
            m = held.pop(at % len(held))
            word = {"t": "frame.done", "session": m["session"], "seq": m["seq"], "ms": 1.0}
            world.say(kind, {**word, "level": m["level"], **more})

    try:
        for event in given:
            await world.turns()
            read()
            if event[0] == "submit":
                soon = int(1e9 * time.monotonic()) + 1_000_000 * number(event, 3, 1000)
                seq, slot = number(event, 1, (1 << 64) - 1), number(event, 2, (1 << 32) - 1)
                deadline = soon if number(event, 3, 1000) else 0
                send(SlotMessage(SUBMIT, seq=seq, slot=slot, deadline=deadline).pack())
                asked.append(seq)
            elif event[0] == "raw" and len(event) > 1 and isinstance(event[1], str):
                with contextlib.suppress(ValueError):
                    send(bytes.fromhex(event[1][:1000]))
            elif event[0] == "done":
                state["lied"] = state["lied"] or bool(fields(event, 3))
                done(kind_of(event), number(event, 2, SLOTS), fields(event, 3))
            elif event[0] == "pause":
                await session.pause_call(None, bool(event[1:] and event[1]))  # type: ignore[arg-type]
            else:
                state["lied"] = state["lied"] or event[0] == "word"
                common(world, session, event)
        await session.pause_call(None, False)  # type: ignore[arg-type]

        def finished() -> bool:
            for kind in KINDS:
                while world.frames[kind]:
                    done(kind, 0, {})
            answers = [m for m in got if m.type in (DONE, DROP)]
            return read() or len(answers) == len(asked)

        await world.until(finished, "an answer to each frame")
    finally:
        client.close()
        await world.turns()
        session.close()
    answers = [m.seq for m in got if m.type in (DONE, DROP)]
    if answers != asked[: len(answers)]:
        raise Finding(f"frames {asked} were answered by {answers}")
    types = [m.type for m in got]
    if set(types) - {CREDIT, DONE, DROP, ERROR} or ERROR in types[:-1]:
        raise Finding(f"messages {types}")


def text(data: bytes) -> None:
    played(play_text, data)


def text_seeds() -> list[bytes]:
    def says(**message: Any) -> list[Any]:
        return ["word", "gpu", message]

    suspect = says(t="text.suspect", since=1, kernel="k", reason="r")
    token = says(t="text.token", n=3, id=3, text="é" * 40, top5=[[1, 0.5]])
    end = says(t="text.end", reason="length", text="x" * 1200, stats={"a": 1})
    error = says(t="error", error="OutOfMemory", message="it needs 9 bytes")
    lists: list[list[list[Any]]] = [
        [["tokens", 3], ["read", 4096], ["end", "gpu"], ["tokens", 16], ["tokens", 2]],
        [["tokens", 3], suspect, token, end], [["tokens", 9], ["gone"]],
        [["tokens", 3], ["close"]], [["tokens", 1], error],
        [["read", 10], ["tokens", 2], ["cancel"]],
        [["tokens", 2], says(t="text.exported", bytes=6)],
    ]  # fmt: skip
    return [json.dumps(events).encode() for events in lists]


def video(data: bytes) -> None:
    played(play_video, data)


def video_seeds() -> list[bytes]:
    three: list[list[Any]] = [["submit", n, n, 0] for n in range(3)]
    answered: list[list[Any]] = [["done", "gpu", 0, {}], ["done", "gpu", 0, {"tiles": 4}]]
    late: list[list[Any]] = [["submit", n, n, 30] for n in range(3)]
    error = ["word", "gpu", {"t": "error", "error": "OutOfMemory", "message": "it needs 9 bytes"}]
    given_up = ["done", "gpu", 0, {"given_up": True, "part": 0.5}]
    lists = [
        [*three, *answered, ["submit", 7, 0, 0]], [*late, given_up, *answered, ["end", "gpu"]],
        [*three, ["end", "gpu"], ["done", "cpu", 0, {}]],
        [*late, ["pause", True], ["pause", False]],
        [*three, error], [*three, ["close"]], [*three, ["raw", "50565253" + "00" * 60]],
        [["submit", 5, 1, 0], ["submit", 5, 1, 0]],
    ]  # fmt: skip
    return [json.dumps(events).encode() for events in lists]
