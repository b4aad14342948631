# SPDX-License-Identifier: Apache-2.0
"""Targets: what callers, workers and the bus send, templates that models bring along, and what is
read back from disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import struct
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.judge import file_of, refused
from tests.fuzz.models import tiny

ROOT = Path(__file__).resolve().parents[2]


def template(data: bytes) -> None:
    from engine.text.template import ChatTemplate

    talk = [{"role": "user", "content": "Hello <|im_end|>"}, {"role": "assistant", "content": "x"}]
    with refused():
        source = data.decode("utf-8", "replace")
        ChatTemplate(source, "<s>", "</s>", ["<s>", "<|im_end|>"]).render(talk)


def template_seeds() -> list[bytes]:
    return [
        b"{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
        b"{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        b"{%- set ns = namespace(n=0) -%}{%- macro w(x) -%}({{ x }}){%- endmacro -%}"
        b"{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ w(m.content.strip()) }}{% endfor %}"
        b"{{ ns.n * 2 }}{{ messages | map(attribute='role') | join(', ') | upper }}",
    ]


def schema(data: bytes) -> None:
    from engine.text.constraint import Constraint

    with refused():
        constraint = Constraint(tokens(), data.decode("utf-8", "replace"))
        for _ in range(4):
            if constraint.done:
                break
            constraint.accept(int(np.flatnonzero(constraint.allowed())[-1]))


@functools.cache
def tokens() -> Any:
    from engine.backends.null import NullBackend
    from engine.text.model import TextModel

    with file_of(tiny()) as fd:
        return TextModel.load(fd, "", NullBackend()).tokenizer


def schema_seeds() -> list[bytes]:
    whole = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "^a+(b|c)*$"},
            "b": {"type": "array", "items": {"enum": ["x", 1, None]}, "maxItems": 3},
            "c": {"anyOf": [{"type": "integer", "minimum": 3}, {"$ref": "#/$defs/d"}]},
        },
        "required": ["a"], "$defs": {"d": {"const": {"k": [1.5]}}},
    }  # fmt: skip
    return [json.dumps(whole).encode(), b'{"type": "number", "multipleOf": 0.01}']


def journal(data: bytes) -> None:
    from engine.text import journal as reader

    with refused(), file_of(data) as fd:
        reader.read(fd, data[-1] if data else 0)


def journal_seeds() -> list[bytes]:
    settings = {"max_tokens": 5, "temperature": 0.5, "seed": 3, "stop": ["x"], "context": 64}
    head = {"kind": "chat", "messages": [{"role": "user", "content": "x"}], "settings": settings}
    line = json.dumps(head).encode()
    return [line + b" " * (4095 - len(line)) + b"\n" + struct.pack("<3i", 1, 2, 3)]


def journal_header(data: bytes) -> None:
    line = b" ".join(data.split(b"\n"))
    journal(line + b" " * (-(len(line) + 1) % 4096) + b"\n" + struct.pack("<i", 0))


def y4m(data: bytes) -> None:
    from pvrd.y4m import Reader, Y4mError

    with file_of(data) as fd, contextlib.suppress(Y4mError):
        os.lseek(fd, 0, 0)
        reader = Reader(fd)
        header = reader.header()
        if header.frame_bytes <= 1 << 20:
            target = memoryview(bytearray(header.frame_bytes))
            while reader.read_frame([target]):
                pass


def y4m_seeds() -> list[bytes]:
    head = b"YUV4MPEG2 W4 H2 F25:1 Ip A1:1 C420mpeg2 XCOLORRANGE=FULL\n"
    return [head + (b"FRAME\n" + bytes(12)) * 2, b"YUV4MPEG2 W2 H2 Cmono\nFRAME Ip\nabcd"]


def slots(data: bytes) -> None:
    """A client's datagrams, of the length that their first byte says."""
    from pvrd.slot_socket import SlotMessage, SlotSocket

    async def feed() -> None:
        got: list[SlotMessage] = []
        ours = SlotSocket(got.append, lambda m: None, lambda: None)
        client, at = ours.client.dup(), 0
        client.setblocking(False)
        while at < len(data):
            size = data[at]
            with contextlib.suppress(OSError):
                client.send(data[at + 1 : at + 1 + size])
            at += 1 + size
        for _ in range(4):
            await asyncio.sleep(0)
        for message in got:
            assert SlotMessage.unpack(message.pack()) == message
        ours.close()
        client.close()

    asyncio.run(feed())


def slots_seeds() -> list[bytes]:
    from pvrd.slot_socket import SUBMIT, SlotMessage

    return [b"".join(b"\x40" + SlotMessage(SUBMIT, seq=n, slot=n, pts=-n).pack() for n in range(3))]


def stream(data: bytes) -> None:
    """What a client reads: it trusts no daemon on a bus either."""
    from pvrd.client_stream import TextStream

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        os.write(writer, data)
    os.close(writer)
    with refused():
        lines = TextStream(reader)
        try:
            for _ in lines:
                pass
        finally:
            lines.close()


def stream_seeds() -> list[bytes]:
    lines: list[dict[str, Any]] = [
        {"v": 1, "seq": 0, "type": "start", "model": "m", "prompt_tokens": 3},
        {"v": 1, "seq": 1, "type": "token", "n": 0, "id": 5, "text": "é"},
        {"v": 1, "seq": 2, "type": "end", "reason": "stop", "text": "", "tokens": 1},
    ]
    return [b"".join(json.dumps(line).encode() + b"\n" for line in lines)]


def worker(data: bytes) -> None:
    from pvrd.workers import protocol

    with contextlib.suppress(protocol.ProtocolError):
        assert isinstance(protocol.decode(data)["t"], str)


def worker_seeds() -> list[bytes]:
    return [b'{"t": "text.token", "job": "j1", "n": 0, "id": 7, "text": "x"}']


def bus(data: bytes) -> None:
    """Messages as a bus passes them on, and as it never would."""
    from pvrd.bus import BusError, Connection

    async def feed() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        theirs.setblocking(False)
        connection = Connection(ours)
        connection.unique_name = ":1.1"
        calls: list[Any] = []

        def on_call(call: Any) -> None:
            calls.append(call)
            call.fds.close()
            with contextlib.suppress(BusError):
                connection.error(call, "a.b.C", "no")

        connection.on_call = on_call
        with contextlib.suppress(BlockingIOError):
            theirs.send(data)
        for _ in range(3):
            if not connection.closed.done():
                connection._wire.readable()
        connection.close()
        theirs.close()

    asyncio.run(feed())


def bus_seeds() -> list[bytes]:
    from dbus_next.message import Message
    from dbus_next.signature import Variant

    out = []
    for signature, body in (
        ("a{sv}", [{"model": Variant("s", "x"), "n": Variant("a{sv}", {"k": Variant("u", 1)})}]),
        ("sa{sv}", ["x", {}]), ("aa{ss}a{sv}", [[{"role": "user"}], {}]),
        ("(ids)ad", [[1, 2.0, "x"], [1.0]]),
    ):  # fmt: skip
        call = Message(":1.2", "/a/b", "a.b.C", "D", signature=signature, body=body, serial=3)
        data = bytes(call._marshall(False))
        # What is sent has no sender yet: the bus adds it. Here the receiver's field becomes it.
        assert data.count(b"\6\1s\0") == 1
        out += [data, data.replace(b"\6\1s\0", b"\7\1s\0")]
    return out


def config(data: bytes) -> None:
    from pvrd.config import ConfigError, Paths, load

    with tempfile.TemporaryDirectory() as name, contextlib.suppress(ConfigError):
        folder = Path(name)
        (folder / "c.toml").write_bytes(data)
        load(Paths(folder, folder, folder), folder / "c.toml")


def config_seeds() -> list[bytes]:
    tomllib.loads((ROOT / "systemd/pvrd.toml").read_text())
    return [b'[limits]\nsessions = 3\nbytes = 1\n[models]\npaths = ["/x"]\n[debug]\nfaults = []\n']
