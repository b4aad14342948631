# SPDX-License-Identifier: Apache-2.0
"""As much of a compositor as pvr-agent sees, in a thread; what it shows when is the test's."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pvrd.agent import protocol
from pvrd.agent.protocol import Interface

CLOCK = time.CLOCK_MONOTONIC
ALL = ("wl_compositor", "wl_shm", "xdg_wm_base", "zwlr_layer_shell_v1", "wp_presentation")
INTERFACES = {
    value.name: value for value in vars(protocol).values() if isinstance(value, Interface)
}
MADE = {  # request -> what its new object is
    "get_registry": "wl_registry", "sync": "wl_callback", "create_surface": "wl_surface",
    "create_region": "wl_region", "create_pool": "wl_shm_pool", "create_buffer": "wl_buffer",
    "get_xdg_surface": "xdg_surface", "get_toplevel": "xdg_toplevel",
    "frame": "wl_callback", "get_layer_surface": "zwlr_layer_surface_v1",
    "feedback": "wp_presentation_feedback",
}  # fmt: skip


class FakeCompositor:
    """Listens at `path`. `show(n)` says what happens to the n-th frame of a client: a step of the
    counter of refreshes, or "discard", "hide" (no word), "stop" (answers nothing any more), "end"
    (closes), "error", "garbage", "close" (the user closes the surface).
    """

    def __init__(
        self,
        path: Path,
        show: Callable[[int], int | str] = lambda n: 1,
        offers: Sequence[str] = ALL,
        refresh: int = 1_000_000_000,
        silent: bool = False,
    ) -> None:
        self.show, self.offers, self.refresh = show, offers, refresh
        self._silent = silent  # from the start
        self.asked: list[tuple[str, str, list[Any]]] = []  # (interface, request, values)
        self.clients = 0
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        self._client: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> FakeCompositor:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        if self._client is not None:
            self.end_client()
        self._thread.join()
        self._listening.close()

    def end_client(self) -> None:
        """As if the compositor crashed."""
        assert self._client is not None
        with contextlib.suppress(OSError):  # it went by itself
            self._client.shutdown(socket.SHUT_RDWR)

    def count(self, request: str) -> int:
        return sum(1 for _, name, _ in self.asked if name == request)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.clients += 1
            with client, contextlib.suppress(OSError):  # it may be gone
                self._client = client
                self._talk(client)

    def _talk(self, client: socket.socket) -> None:
        objects: dict[int, str] = {1: "wl_display"}
        feedbacks: list[int] = []
        callbacks: list[int] = []
        data = bytearray()
        frames = seq = 0
        role = 0
        silent = self._silent

        def event(number: int, name: str, *values: Any) -> None:
            rows = INTERFACES[objects[number]].events
            opcode = [row[0] for row in rows].index(name)
            body = b""
            for kind, value in zip(rows[opcode][1], values, strict=True):
                if kind == "s":
                    text = value.encode() + b"\0"
                    body += struct.pack("=I", len(text)) + text + bytes(-len(text) % 4)
                elif kind == "a":
                    body += struct.pack("=I", len(value)) + value
                else:
                    body += struct.pack("=i" if kind == "i" else "=I", value)
            client.sendall(struct.pack("=II", number, len(body) + 8 << 16 | opcode) + body)

        def gone(number: int) -> None:
            del objects[number]
            event(1, "delete_id", number)

        while True:
            got, fds, _, _ = socket.recv_fds(client, 65536, 4)
            for fd in fds:
                socket.close(fd)
            if not got:
                return
            data += got
            while len(data) >= 8:
                number, word = struct.unpack_from("=II", data)
                if len(data) < word >> 16:
                    break
                interface = objects[number]
                name, types = INTERFACES[interface].requests[word & 0xFFFF]
                values = _decode(types, bytes(data[8 : word >> 16]))
                del data[: word >> 16]
                self.asked.append((interface, name, values))
                if silent:
                    continue
                for kind, value in zip(types, list(values), strict=False):
                    if kind == "n" and name != "bind":
                        assert value not in objects, "a number is used twice"
                        objects[value] = MADE[name]
                if name == "sync":
                    event(values[0], "done", 0)
                    gone(values[0])
                elif name == "get_registry":
                    for i, offer in enumerate(self.offers):
                        event(values[0], "global", i + 1, offer, 9)
                elif name == "bind":
                    objects[values[3]] = values[1]
                    if values[1] == "wp_presentation":
                        event(values[3], "clock_id", CLOCK)
                elif name in ("get_layer_surface", "get_toplevel"):
                    role = values[0]
                elif name == "get_xdg_surface":
                    surface = values[0]
                elif name == "frame":
                    callbacks.append(values[0])
                elif name == "feedback":
                    feedbacks.append(values[1])
                elif name == "destroy":
                    gone(number)
                elif name == "commit" and not feedbacks:  # the first: it gets its size
                    if objects[role] == "xdg_toplevel":
                        event(role, "configure", 0, 0, b"")
                        event(surface, "configure", 7)
                    else:
                        event(role, "configure", 7, 1, 1)
                elif name == "commit":
                    what = self.show(frames)
                    frames += 1
                    told = feedbacks.pop()
                    if isinstance(what, int) or what == "discard":
                        asked = callbacks.pop()
                        event(asked, "done", 0)
                        gone(asked)
                    if isinstance(what, int):
                        seq += what
                        now = time.clock_gettime_ns(CLOCK)
                        s, ns = divmod(now, 1_000_000_000)
                        event(told, "presented", s >> 32, s & 0xFFFFFFFF, ns, self.refresh,
                              seq >> 32, seq & 0xFFFFFFFF, 1)  # fmt: skip
                        gone(told)
                    elif what == "discard":
                        event(told, "discarded")
                        gone(told)
                    elif what == "stop":
                        silent = True
                    elif what == "end":
                        return
                    elif what == "error":
                        event(1, "error", 1, 3, "no\nsuch thing")
                    elif what == "garbage":
                        client.sendall(struct.pack("=II", told, 3 << 16))
                    elif what == "short":
                        client.sendall(struct.pack("=III", told, 12 << 16 | 1, 0))
                    elif what == "close":
                        event(role, "closed")


def _decode(types: str, body: bytes) -> list[Any]:
    values: list[Any] = []
    at = 0
    for kind in types:
        if kind == "h":
            continue
        (word,) = struct.unpack_from("=i" if kind == "i" else "=I", body, at)
        at += 4
        if kind == "s":
            values.append(body[at : at + word - 1].decode())
            at += word + -word % 4
        else:
            values.append(word)
    return values
