# SPDX-License-Identifier: Apache-2.0
"""What is fuzzed: each reader of what strangers write, with seeds that it accepts.

A target gets bytes and returns, or raises an error of the closed list that users read. Anything
else is a finding: another exception, a crash, more memory or time than the runner allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import socket
import struct
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz import sessions

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


@contextlib.contextmanager
def file_of(data: bytes) -> Iterator[int]:
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """The errors that users read."""
    from engine.errors import PvrError
    from pvrd.errors import PvrdError

    try:
        yield
    except (PvrError, PvrdError) as e:
        if strict or not str(e):  # an error without a sentence is a finding
            raise RuntimeError("refused") from e


strict = False  # seeds are to be accepted


# -- models


def gguf(data: bytes) -> None:
    from engine.text import compiled

    with refused(), file_of(data) as fd, compiled.prepared(fd) as (_, blobs):
        for blob in blobs:
            if blob.nbytes < 1 << 20:
                for _ in blob.chunks():
                    pass


@functools.cache
def tiny(kind: str = "Q8_0") -> bytes:
    from tests.engine.conftest import Shape, write_model

    shape = Shape(layers=1, hidden=32, ffn=32, heads=2, kv_heads=1, vocab=264, context=32)
    with tempfile.TemporaryDirectory() as folder:
        return write_model(Path(folder) / "m.gguf", kind, shape).read_bytes()


def safetensors(data: bytes) -> None:
    from engine.importers.safetensors import SafeTensors

    with refused(), file_of(data) as fd:
        found = SafeTensors(fd)
        for tensor in list(found.tensors.values())[:16]:
            found.read(tensor, 0, 1)


def safetensors_seeds() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F16", "shape": [2, 4], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]},
    }
    text = json.dumps(header).encode()
    return [struct.pack("<Q", len(text)) + text + bytes(32)]


def onnx(data: bytes) -> None:
    from engine.importers import convnets
    from engine.video.convnet import prepared

    with refused(), file_of(data) as fd, np.errstate(all="ignore"):
        prepared(convnets.load_fd(fd))


def onnx_seeds() -> list[bytes]:
    from tests.engine import networks
    from tests.engine.networks import node, weights

    rng = np.random.default_rng(7)
    conv = node("Conv", "x w", "a", pads=[1, 1, 1, 1], kernel_shape=[3, 3])
    shuffle = node("DepthToSpace", "a", "y", blocksize=2)
    plain = networks.onnx([conv, shuffle], {"w": weights(rng, 12, 3, 3)})
    sizes = node("Reshape", "a s", "b"), node("Transpose", "b", "c", perm=[0, 1, 4, 2, 5, 3])
    s = {"s": np.array([1, 3, 2, 2, 240, 336]), "t": np.array([1, 3, 480, 672])}
    more = networks.onnx(
        [conv, *sizes, node("Reshape", "c t", "y")], {"w": weights(rng, 12, 3, 3), **s}
    )
    return [plain, more]


def onnx_text(data: bytes) -> None:
    """The same form, read as a decoder."""
    from engine.importers import onnx_wire
    from engine.importers.onnx_decoder import import_onnx

    with refused(), file_of(data) as fd, np.errstate(all="ignore"):
        import_onnx(onnx_wire.read(fd))


def onnx_text_seeds() -> list[bytes]:
    from tests.engine.test_engine_onnx_decoder import whole

    return [whole("llama-18")]


PARAM_END = b"\n%%%%\n"


def ncnn(data: bytes) -> None:
    from engine.importers import ncnn as importer

    param, _, weights = data.partition(PARAM_END)
    with refused(), file_of(param) as text, file_of(weights) as numbers, np.errstate(all="ignore"):
        importer.load(text, numbers)


def ncnn_seeds() -> list[bytes]:
    lines = (
        "7767517\n4 4\nInput in 0 1 data 0=8 1=8 2=3\n"
        "Convolution c 1 1 data a 0=12 1=3 4=1 5=1 6=324\nPReLU p 1 1 a b 0=12\n"
        "PixelShuffle s 1 1 b out 0=2\n"
    )
    numbers = struct.pack("<I", 0) + bytes(4 * 324) + bytes(4 * 12) + bytes(4 * 12)
    return [lines.encode() + PARAM_END + numbers]


def picture(data: bytes) -> None:
    from engine.video import picture_files

    with refused():
        if picture_files.header(data).width < 4096:
            picture_files.decode(data)


def picture_seeds() -> list[bytes]:
    from PIL import Image

    out = []
    image = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    for form, mode in (("png", "RGB"), ("png", "LA"), ("png", "P"), ("jpeg", "RGB")):
        buffer = io.BytesIO()
        image.convert(mode).save(buffer, form)
        out.append(buffer.getvalue())
    deep = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)
    buffer = io.BytesIO()
    deep.save(buffer, "png")
    return [*out, buffer.getvalue()]


# -- compiled models: the header as JSON, with checksums that are right, and run on the CPU


@functools.cache
def compiled_parts(kind: str) -> tuple[dict[str, Any], bytes]:
    """The header of a compiled model, and its data area."""
    from engine import pvrm
    from engine.text import compiled

    if kind == "text":
        fd = os.memfd_create("pvrm")
        with file_of(tiny("F16")) as source, compiled.prepared(source) as (metadata, blobs):
            pvrm.write_fd(fd, metadata, blobs)
        data = os.pread(fd, 1 << 26, 0)
        os.close(fd)
    elif kind == "net":
        from engine.importers import convnets
        from engine.video import convnet
        from tests.engine.video.test_convnet_pipeline import file

        fd = os.memfd_create("pvrm")
        with file_of(file(3)) as source:
            pvrm.write_fd(fd, *convnet.compiled(convnets.load_fd(source), "f16", {"name": "x"}))
        data = os.pread(fd, 1 << 26, 0)
        os.close(fd)
    else:
        data = (ROOT / "engine/video/models/nsr-fast.pvrm").read_bytes()
    length = struct.unpack_from("<I", data, 12)[0]
    return json.loads(data[16 : 16 + length]), data[-(-(20 + length) // 4096) * 4096 :]


def pvrm_file(header: bytes, area: bytes) -> bytes:
    """A compiled model around a header, whatever that is."""
    front = b"PVRM1\0\0\0" + struct.pack("<II", 1, len(header)) + header
    front += struct.pack("<I", zlib.crc32(header))
    return front + bytes(-len(front) % 4096) + area


def pvrm(data: bytes) -> None:
    from engine.pvrm import Pvrm
    from engine.text import compiled
    from engine.video import kinds

    with refused(), file_of(data) as fd:
        Pvrm.open(fd)
        for inspect in (compiled.inspect, kinds.inspect):
            with refused():
                inspect(fd)


def pvrm_seeds() -> list[bytes]:
    parts = [compiled_parts(kind) for kind in ("text", "video")]
    return [pvrm_file(json.dumps(header).encode(), area) for header, area in parts]


def pvrm_text(data: bytes) -> None:
    """What passes the checks has to run without harm to memory: three tokens on the CPU."""
    from engine.backends.base import DeviceInfo, Limits
    from engine.backends.cpu import CpuBackend
    from engine.lower import lower
    from engine.lower_batch import NoBatch, lower_batch
    from engine.text.generate import Request
    from engine.text.model import TextModel
    from tests.engine.test_engine_generate import run

    with refused(), file_of(pvrm_file(data, compiled_parts("text")[1])) as fd:
        backend = CpuBackend(1)
        model = TextModel.load(fd, "", backend)
        settings = {"max_tokens": 3, "temperature": 0, "context": 16}
        try:
            asked = Request.parse({"kind": "generate", "prompt": "w1", "settings": settings})
            run(model.state(16), asked)
            # A GPU is told more than a CPU: norms and gates inside of products.
            lower(model.graph, DeviceInfo("gpu", "a GPU", "none", False, Limits()), 16, 4).check()
            with contextlib.suppress(NoBatch):
                lower_batch(model.graph, backend.info, [16, 8])
        finally:
            model.close()


def pvrm_text_seeds() -> list[bytes]:
    return [json.dumps(compiled_parts("text")[0]).encode()]


def one_frame(pipeline: Any) -> None:
    """A black frame through a pipeline."""
    from engine.video.frames import empty

    pipeline.begin(empty(pipeline.format), empty(pipeline.out_format))
    while not pipeline.step():
        pass


def pvrm_video(data: bytes) -> None:
    from engine.backends.cpu import CpuBackend
    from engine.video.frames import FrameFormat
    from engine.video.network import VideoModel
    from engine.video.upscale import VideoPipeline

    with refused(), file_of(pvrm_file(data, compiled_parts("video")[1])) as fd:
        backend = CpuBackend(1)
        model = VideoModel.load(fd, backend)
        try:
            pipeline = VideoPipeline(backend, model, FrameFormat(20, 12))
            one_frame(pipeline)
        finally:
            model.close()


def pvrm_video_seeds() -> list[bytes]:
    return [json.dumps(compiled_parts("video")[0]).encode()]


def pvrm_net(data: bytes) -> None:
    """Somebody's network, compiled: what passes the checks makes a frame on the CPU."""
    from engine.backends.cpu import CpuBackend
    from engine.video.convnet import ConvModel
    from engine.video.convnet_run import ConvPipeline
    from engine.video.frames import FrameFormat

    with refused(), file_of(pvrm_file(data, compiled_parts("net")[1])) as fd:
        backend = CpuBackend(1)
        model = ConvModel.load(fd, backend)
        try:
            pipeline = ConvPipeline(backend, model, FrameFormat(20, 12))
            one_frame(pipeline)
            pipeline.close()
        finally:
            model.close()


def pvrm_net_seeds() -> list[bytes]:
    return [json.dumps(compiled_parts("net")[0]).encode()]


# -- what models bring along, and what callers send


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
    from pvrd.client import TextStream

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


TARGETS: dict[str, Target] = {
    "gguf": Target(gguf, lambda: [tiny()]),
    "safetensors": Target(safetensors, safetensors_seeds),
    "onnx": Target(onnx, onnx_seeds),
    "onnx_text": Target(onnx_text, onnx_text_seeds),
    "ncnn": Target(ncnn, ncnn_seeds),
    "picture": Target(picture, picture_seeds),
    "pvrm": Target(pvrm, pvrm_seeds),
    "pvrm_text": Target(pvrm_text, pvrm_text_seeds),
    "pvrm_video": Target(pvrm_video, pvrm_video_seeds),
    "pvrm_net": Target(pvrm_net, pvrm_net_seeds),
    "template": Target(template, template_seeds),
    "schema": Target(schema, schema_seeds),
    "journal": Target(journal, journal_seeds),
    "journal_header": Target(
        journal_header, lambda: [s.partition(b"\n")[0].rstrip() for s in journal_seeds()]
    ),
    "y4m": Target(y4m, y4m_seeds),
    "slots": Target(slots, slots_seeds),
    "stream": Target(stream, stream_seeds),
    "worker": Target(worker, worker_seeds),
    "bus": Target(bus, bus_seeds),
    "config": Target(config, config_seeds),
    "text_session": Target(sessions.text, sessions.text_seeds),
    "video_session": Target(sessions.video, sessions.video_seeds),
}
