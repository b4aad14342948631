# SPDX-License-Identifier: Apache-2.0
"""A daemon that does no work but keeps to docs/api.md: what it does hangs on the model's name.

    fake_pvrd.py ADDRESS

It prints a line of JSON for each thing that a test wants to know: ready, cancel, close, config, ….
Models: `echo` answers with the prompt; `endless` never ends; `dies` ends the daemon after two
tokens or one frame; an error's name (`Busy`, `BadModel`, …) refuses with it; `late-NAME` fails in
the stream; `gaps` has rows with gaps; `small` has room for three messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import socket
import sys
import time
from typing import Any

from pvrd.bus import Call, Connection
from pvrd.bus_types import BusAddress
from pvrd.bus_values import V, variant
from pvrd.client import MANAGER, NAME, PATH
from pvrd.client_video import CREDIT, DONE, DROP, ERROR, MAGIC, MESSAGE, SUBMIT
from pvrd.errors import NAMES, PREFIX

SESSION = f"{PATH}/session/1"
DEVICES = [
    {"kind": "gpu", "present": False, "state": "absent", "code": "no_icd", "reason": "None."},
    {"kind": "cpu", "present": True, "state": "ready", "name": "Fake \x1b[31mCPU", "pid": 1},
]
CONFIG: dict[str, Any] = {
    "gpu.allow_software": False,
    "cpu.threads": 0,
    "models.paths": ["/a"],
    "models.text": "",
    "workers.backoff_s": 1.5,
}


def tell(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


class Refused(Exception):
    """Answers with the error of that name."""


class Fake:
    """Everything on one object path, whatever the interface."""

    def __init__(self, bus: Connection) -> None:
        self.bus = bus
        self.options: dict[str, Any] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.cancelled = asyncio.Event()
        self.config = dict(CONFIG)
        self.full = False  # the context, by the chat under way

    def on_call(self, call: Call) -> None:
        method = getattr(self, f"do_{call.member}", None)
        try:
            if method is None:
                self.bus.error(call, "org.freedesktop.DBus.Error.UnknownMethod", call.member)
                return
            method(call)
        except Refused as error:
            self.bus.error(call, PREFIX + str(error), f"The fake says {error}.")
        finally:
            call.fds.close()

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def take_options(self, given: dict[str, Any]) -> None:
        self.options = {key: value.value for key, value in given.items()}
        tell("options", **self.options)
        if self.options.get("model") in NAMES:
            raise Refused(self.options["model"])

    @property
    def model(self) -> str:
        return str(self.options.get("model", "echo"))

    def do_GetAll(self, call: Call) -> None:
        if call.body[0] == MANAGER:
            found = {
                "Version": V("s", "9.9"),
                "Protocols": V("a{su}", {"text-stream": 1, "slot-socket": 1}),
                "State": V("s", "cpu"),
                "Reason": V("s", "There is no GPU."),
                "Devices": V("aa{sv}", [{k: variant(v) for k, v in d.items()} for d in DEVICES]),
            }
        else:
            found = {"Ready": V("b", True), "Error": V("s", "BadModel: it fell over")}
            found["Restarts"] = V("u", 1)
        self.bus.reply(call, "a{sv}", [found])

    def do_GetStatistics(self, call: Call) -> None:
        jobs = V("a{sv}", {"running": V("t", 1), "waiting": V("t", 2)})
        found = {"uptime_s": V("d", 3661.5), "rss_bytes": V("t", 12345678), "jobs": jobs}
        self.bus.reply(call, "a{sv}", [found])

    def do_GetDiagnostics(self, call: Call) -> None:
        self.bus.reply(call, "aa{sv}", [[]])

    def do_ListModels(self, call: Call) -> None:
        models = [("echo", "text", True), ("luma", "video", True), ("tiny", "text", False)]
        found = [
            {"name": V("s", n), "kind": V("s", k), "default": V("b", d), "size": V("t", 1 << 20)}
            for n, k, d in models
        ]
        self.bus.reply(call, "aa{sv}", [found])

    def do_GetConfig(self, call: Call) -> None:
        self.bus.reply(call, "a{sv}", [{key: variant(v) for key, v in self.config.items()}])

    def do_SetConfig(self, call: Call) -> None:
        values = {key: value.value for key, value in call.body[0].items()}
        tell("config", **values)
        self.config.update(values)
        self.bus.reply(call)

    def do_RemoveModel(self, call: Call) -> None:
        if call.body[0] == "missing":
            raise Refused("UnknownModel")
        tell("remove", name=call.body[0])
        self.bus.reply(call)

    def do_AddModel(self, call: Call) -> None:
        data = os.pread(call.fds.peek(0), 1 << 20, 0)
        tell("add", name=call.body[1], size=len(data), options=sorted(call.body[2]))
        reading, writing = os.pipe()
        with open(writing, "w") as pipe:
            if data.startswith(b"GGUF"):
                pipe.write('{"v":1,"seq":0,"type":"progress","done":1,"total":2}\n')
                end = {"v": 1, "seq": 1, "type": "end", "name": call.body[1], "size": len(data)}
                pipe.write(json.dumps({**end, "kind": "text"}) + "\n")
            else:
                pipe.write('{"v":1,"type":"error","error":"BadModel","message":"It is none."}\n')
        self.bus.reply(call, "a{sv}", [{"progress": V("h", 0)}], [reading])
        os.close(reading)

    def do_OpenText(self, call: Call) -> None:
        self.take_options(call.body[0])
        self.bus.reply(call, "o", [SESSION])

    def do_Generate(self, call: Call) -> None:
        self.text(call, call.body[0], call.body[1])

    def do_Chat(self, call: Call) -> None:
        tell("messages", messages=call.body[0])
        self.full = self.model == "small" and len(call.body[0]) > 3
        self.text(call, call.body[0][-1]["content"], call.body[1])

    def do_CountTokens(self, call: Call) -> None:
        self.bus.reply(call, "u", [len(call.body[0].split())])

    def do_Cancel(self, call: Call) -> None:
        tell("cancel")
        self.cancelled.set()
        self.bus.reply(call)

    def do_Close(self, call: Call) -> None:
        tell("close")
        self.bus.reply(call)

    def text(self, call: Call, prompt: str, options: dict[str, Any]) -> None:
        tell("job", **{key: value.value for key, value in options.items()})
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self.bus.reply(call, "h", [0], [reading])
        os.close(reading)
        self.cancelled.clear()
        self.spawn(self.write(writing, prompt, "top5" in options))

    async def write(self, fd: int, prompt: str, top5: bool) -> None:
        seq = 0

        def line(**values: Any) -> None:
            nonlocal seq
            os.write(fd, json.dumps({"v": 1, "seq": seq, **values}).encode() + b"\n")
            seq += 1

        words = prompt.split(" ")
        try:
            start = {
                "prompt_tokens": len(words),
                "context": 99,
                "seed": 7,
                "model": self.model,
                "parameters": 135_000_000,
            }
            line(type="start", device="gpu", device_name="Fake GPU", **start)
            if self.model.startswith("late-") or self.full:
                error = "ContextFull" if self.full else self.model.removeprefix("late-")
                line(type="error", error=error, message="It went wrong.")
                return
            n = 0
            while self.model == "endless" or n < len(words):
                word = words[n % len(words)]
                best = {"top5": [[n, 1.5]]} if top5 else {}
                line(type="token", n=n, id=100 + n, text=word + " ", **best)
                n += 1
                if n == 1:
                    moved = {"device_name": "Fake CPU", "reason": "It hung.", "restarts": 1}
                    line(type="device", device="cpu", **moved)
                    line(type="hint", note="a type of a later version")
                if n == 2 and self.model == "dies":
                    os._exit(9)
                await asyncio.sleep(0)
                if self.model == "endless":
                    tell("token", n=n)
                    # A reader that is behind is waited for; one that cancels or goes ends it.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self.cancelled.wait(), 0.01)
                    if self.cancelled.is_set():
                        break
            stats = {"prefill_s": 0.5, "prefill_tokens": 4, "decode_s": 2.0, "decode_tokens": 8}
            reason = "cancelled" if self.cancelled.is_set() else "stop"
            line(type="end", reason=reason, text="held", tokens=n, restarts=1, stats=stats)
        except OSError:
            tell("gone")
        finally:
            os.close(fd)

    def do_Upscale(self, call: Call) -> None:
        self.take_options(call.body[1])
        picture = os.pread(call.fds.peek(0), 1 << 20, 0)
        result = os.memfd_create("result")
        os.write(result, picture * 2)
        reading, writing = os.pipe()
        with open(writing, "w") as pipe:
            pipe.write('{"v":1,"seq":0,"type":"progress","done":1,"total":2}\n')
            if self.model != "dies":
                end = {"width": 8, "height": 6, "device": "cpu", "tiles": 2, "ms": 4.0}
                pipe.write(json.dumps({"v": 1, "seq": 1, "type": "end", **end}) + "\n")
        self.bus.reply(call, "ha{sv}", [0, {"result": V("h", 1)}], [reading, result])
        os.close(reading)
        os.close(result)

    def do_OpenVideo(self, call: Call) -> None:
        self.take_options(call.body[0])
        width, height, scale = (int(self.options[key]) for key in ("width", "height", "scale"))
        colour = self.options["pixel"] == "i420"
        gap = 3 if self.model == "gaps" else 0
        at = 0

        def planes(w: int, h: int) -> list[list[int]]:
            nonlocal at
            half = ((w + 1) // 2, (h + 1) // 2)
            found = []
            for samples, rows in [(w, h), half, half][: 3 if colour else 1]:
                found.append([at, samples + gap, samples, rows])
                at += (samples + gap) * rows
            return found

        layout = {
            "slots": V("u", 2),
            "in_planes": V("a(tuuu)", planes(width, height)),
            "out_planes": V("a(tuuu)", planes(width * scale, height * scale)),
            "slot_bytes": V("t", at),
            "ring_bytes": V("t", 2 * at),
            "model": V("s", "luma"),
            "out_width": V("u", width * scale),
            "out_height": V("u", height * scale),
        }
        ring = os.memfd_create("ring")
        os.ftruncate(ring, 2 * at)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.bus.reply(call, "ohha{sv}", [SESSION, 0, 1, layout], [ring, theirs.fileno()])
        theirs.close()
        self.spawn(self.frames(ours, mmap.mmap(ring, 2 * at), layout, scale))
        os.close(ring)

    async def frames(self, sock: socket.socket, ring: mmap.mmap, layout: Any, scale: int) -> None:
        loop = asyncio.get_running_loop()

        async def send(kind: int, seq: int = 0, slot: int = 0, status: int = 0, *rest: int) -> None:
            fields = [*rest, *[0] * (7 - len(rest))]
            await loop.sock_sendall(sock, MESSAGE.pack(MAGIC, 1, kind, seq, slot, status, *fields))

        size = layout["slot_bytes"].value
        count = 0
        with contextlib.suppress(OSError):
            await send(CREDIT, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2)
            while data := await loop.sock_recv(sock, 64):
                _, _, kind, seq, slot, _, _, deadline, *_ = MESSAGE.unpack(data)
                assert kind == SUBMIT
                count += 1
                if self.model == "dies":
                    os._exit(9)
                if self.model == "late":
                    await send(ERROR, 0, 0, 5)
                    break
                if self.model == "endless":
                    tell("frame", seq=seq)
                if deadline:
                    left = deadline - time.monotonic_ns()
                    tell("deadline", seq=seq, left_ms=left / 1e6, at_s=time.monotonic())
                if (self.model == "drops" and seq % 3 == 0) or (self.model == "slow" and seq < 3):
                    await send(DROP, seq, slot)
                    continue
                self.double(ring, slot * size, layout, scale)
                await send(DONE, seq, slot, 0, 0, 0, 4, 1, 2_500_000, 2)
        tell("frames", count=count)
        sock.close()

    @staticmethod
    def double(ring: mmap.mmap, base: int, layout: Any, scale: int) -> None:
        """Repeats the samples, as many as the output takes."""
        pairs = zip(layout["in_planes"].value, layout["out_planes"].value, strict=True)
        for (at, stride, samples, _), (to, out_stride, out_samples, out_rows) in pairs:
            for y in range(out_rows):
                start = base + at + y // scale * stride
                row = ring[start : start + samples]
                wide = bytes(sample for sample in row for _ in range(scale))[:out_samples]
                ring[base + to + y * out_stride : base + to + y * out_stride + out_samples] = wide


async def main(address: str) -> None:
    bus = await Connection.connect(BusAddress.parse(address))
    bus.on_call = Fake(bus).on_call
    await bus.request_name(NAME)
    tell("ready")
    await bus.closed


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
