# SPDX-License-Identifier: Apache-2.0
"""The real worker program at one end of a socket, the test in pvrd's place at the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pvrd.workers import protocol
from tests.engine.conftest import write_model

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0  # only ends a broken test


class Peer:
    """pvrd's end of a worker."""

    def __init__(self, kind: str, generation: int = 1, **config: Any) -> None:
        self.sock, theirs = protocol.pair()
        self.sock.settimeout(WAIT_S)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pvrd.workers", "--kind", kind, "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], cwd=ROOT,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        theirs.close()
        self.send("hello", protocol=1, kind=kind, generation=generation, config=config)
        self.canary: list[dict[str, Any]] = []
        self.hello = self.expect("hello")

    def send(self, t: str, fds: Sequence[int] = (), /, **fields: Any) -> None:
        protocol.send(self.sock, {"t": t, **fields}, fds)

    def recv(self) -> dict[str, Any]:
        """The next message; what the canary says comes at any time and is left out."""
        while True:
            received = protocol.recv(self.sock)
            assert received is not None, "the worker ended"
            if received.message["t"] != "canary":
                return received.message
            self.canary.append(received.message)

    def until(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """All messages up to the first of this kind with these fields, itself the last."""
        seen = []
        while True:
            seen.append(self.recv())
            if seen[-1]["t"] == kind and fields.items() <= seen[-1].items():
                return seen
            assert seen[-1]["t"] != "error", seen[-1]

    def expect(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self.until(kind, **fields)[-1]

    def error(self) -> dict[str, Any]:
        while (message := self.recv())["t"] != "error":
            pass
        return message

    def load(
        self, path: Path, key: str = "m", kind: str = "text", cache: str = ""
    ) -> dict[str, Any]:
        with path.open("rb") as f:
            self.send("load", [f.fileno()], model=key, name="tiny", kind=kind, cache=cache)
        return self.expect("loaded", model=key)

    def text(
        self,
        job: str,
        prompt: str,
        ids: Sequence[int] = (),
        session: str = "s",
        model: str = "m",
        **settings: Any,
    ) -> None:
        fd = journal({"kind": "generate", "prompt": prompt, "settings": settings}, ids)
        self.send(
            "text", [fd], job=job, session=session, model=model, settings={}, delivered=len(ids)
        )
        os.close(fd)

    def answer(self, job: str) -> list[dict[str, Any]]:
        """The job's tokens to its end; acknowledges each."""
        tokens: list[int] = []
        while True:
            message = self.recv()
            assert message["t"] != "error", message
            if message.get("job") != job:
                continue
            if message["t"] == "text.end":
                return [*tokens, message]
            if message["t"] == "text.token":
                tokens.append(message)
                self.send("ack", job=job, n=message["n"] + 1)

    def close(self) -> tuple[int, str]:
        """Closes the socket; exit status and what the worker wrote to stderr."""
        self.sock.close()
        return self.ended()

    def ended(self) -> tuple[int, str]:
        """Waits for the worker's end; exit status and what it wrote to stderr."""
        if self.process.stderr is not None and not self.process.stderr.closed:
            try:
                self._err = self.process.communicate(timeout=WAIT_S)[1].decode()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()
                raise
        return self.process.returncode, self._err


def journal(header: Mapping[str, Any], ids: Sequence[int]) -> int:
    """A journal as pvrd writes it."""
    line = json.dumps(header).encode()
    size = -(-(len(line) + 1) // protocol.JOURNAL_ALIGN) * protocol.JOURNAL_ALIGN
    fd = os.memfd_create("journal", os.MFD_CLOEXEC)
    os.write(fd, line.ljust(size - 1) + b"\n" + b"".join(i.to_bytes(4, "little") for i in ids))
    return fd


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    """Starts workers: peer("cpu", threads=1)."""
    with ExitStack() as stack:

        def start(kind: str = "cpu", generation: int = 1, **config: Any) -> Peer:
            made = Peer(kind, generation, **config)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama."""
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "F16")
