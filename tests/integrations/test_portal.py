# SPDX-License-Identifier: Apache-2.0
"""The backend of the proposed language portal, called as its frontend calls it, with a real
pvrd."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pvrd.bus import PROPERTIES, BusAddress, BusError, Connection, Signal
from pvrd.bus_values import plain
from pvrd.http.asked import Refused
from pvrd.portal.backend import FRONTEND, LANGUAGE, NAME, PATH, REQUEST, SESSION, turns
from tests.buses import ROOT
from tests.daemons import PROMPT, Daemon, write_tiny

PARTS = json.dumps([{"type": "input_text", "text": PROMPT}])
TALK = f"{PATH}/session/1/a"
VECTORS = f"{PATH}/session/1/b"


class Frontend:
    """What xdg-desktop-portal is to its backends."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.signals: list[Signal] = []
        self._count = 0

    async def start(self) -> None:
        await self.connection.request_name(FRONTEND)
        await self.connection.subscribe(self.signals.append, sender=NAME, interface=LANGUAGE)

    def handle(self) -> str:
        self._count += 1
        return f"{PATH}/request/1/r{self._count}"

    async def call(self, member: str, signature: str, *body: Any, **where: Any) -> Any:
        path, interface = where.get("path", PATH), where.get("interface", LANGUAGE)
        reply = await self.connection.call(
            NAME, path, interface, member, signature, list(body), timeout=30
        )
        return [plain(v) for v in reply.body]

    async def request(self, member: str, signature: str, session: str, *body: Any) -> list[Any]:
        """A request to its end: what its signals said, behind handle and session."""
        handle = self.handle()
        await self.call(member, f"oo{signature}", handle, session, *body)
        said = [s.body for s in self.signals if s.body[0] == handle]
        assert all(body[1] == session for body in said)
        return [body[2:] for body in said]

    async def session(self, path: str, use_case: str, told: str = "") -> None:
        await self.request("CreateSession", "ssss", path, "org.example.App", "", use_case, told)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bus with pvrd and the backend on it."""
    folder = tmp_path_factory.mktemp("portal")
    (folder / "models").mkdir()
    write_tiny(folder / "models")
    config = {"models.text": "tiny", "gpu.enabled": False, "sensors.system": False}
    with Daemon(folder, folder / "models", config) as daemon:
        daemon.client().close()
        command = [sys.executable, "-m", "pvrd.portal", "--context", "256"]
        command += ["--bus", daemon.address, "--session-bus", daemon.address]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert NAME in process.stderr.readline()
            yield daemon.address
            process.terminate()
            assert process.wait(20) == 0
            assert "Traceback" not in process.stderr.read()


@asynccontextmanager
async def frontend(address: str) -> AsyncIterator[Frontend]:
    connection = await Connection.connect(BusAddress.parse(address))
    try:
        made = Frontend(connection)
        await made.start()
        yield made
    finally:
        connection.close()


def run(address: str, work: Callable[[Frontend], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with frontend(address) as made:
            await work(made)

    asyncio.run(whole())


@pytest.mark.bus
def test_an_answer_comes_in_pieces(address: str) -> None:
    async def work(portal: Frontend) -> None:
        found = await portal.call("Get", "ss", LANGUAGE, "version", interface=PROPERTIES)
        assert found == [1]
        available = await portal.call("GetUseCaseAvailability", "ss", "a", "language.summarize")
        assert available == [[True, "available", ""]]
        other = await portal.call("GetUseCaseAvailability", "ss", "a", "vision.describe")
        assert other[0][:2] == [False, "unsupported_use_case"]
        await portal.session(TALK, "language.summarize", "Be short.")
        options = [12, 0.0, "", "", "interactive"]
        first = await portal.request("StreamResponse", "sah(xdsss)", TALK, PARTS, [], options)
        assert [done for _, done in first] == [False] * (len(first) - 1) + [True]
        assert len(first) > 2
        options[4] = "background"
        again = await portal.request("StreamResponse", "sah(xdsss)", TALK, PARTS, [], options)
        assert again == first
        fields = [["sunny", "boolean", "is it?", True]]
        (snapshot,) = await portal.request(
            "StreamRespondGuided", "saha(sssb)a(sss)(xds)", TALK, PROMPT, [], fields, [],
            [60, 0.7, "interactive"],
        )  # fmt: skip
        assert json.loads(snapshot[0])["sunny"] in (True, False)
        assert snapshot[1] is True

    run(address, work)


@pytest.mark.bus
def test_vectors(address: str) -> None:
    async def work(portal: Frontend) -> None:
        await portal.session(VECTORS, "language.embed")
        (said,) = await portal.request("StreamEmbed", "s(s)", VECTORS, PROMPT, ["interactive"])
        assert sum(v * v for v in said[0]) == pytest.approx(1, abs=1e-4)
        assert said[1:] == ["pvrd:tiny:mean", True]

    run(address, work)


@pytest.mark.bus
def test_requests_and_sessions_are_closed(address: str) -> None:
    async def work(portal: Frontend) -> None:
        await portal.session(TALK, "language.summarize")
        handle = portal.handle()
        options = [200, 0.0, "", "", "interactive"]
        body = [handle, TALK, PARTS, [], options]
        job = asyncio.ensure_future(portal.call("StreamResponse", "oosah(xdsss)", *body))
        while not any(s.body[0] == handle for s in portal.signals):
            await asyncio.sleep(0)
        await portal.call("Close", "", path=handle, interface=REQUEST)
        with pytest.raises(BusError) as closed:
            await job
        assert closed.value.name.endswith("portal.Error.Cancelled")
        assert not any(s.body[0] == handle and s.body[3] for s in portal.signals)
        await portal.call("Close", "", path=TALK, interface=SESSION)
        await refused(portal, "no such session", "StreamResponse", "sah(xdsss)", PARTS, [], options)

    async def refused(portal: Frontend, word: str, member: str, signature: str, *body: Any) -> None:
        with pytest.raises(BusError, match=word) as caught:
            await portal.request(member, signature, TALK, *body)
        assert caught.value.name == "org.freedesktop.portal.Error.InvalidArgument"

    async def wrong(portal: Frontend) -> None:
        options = [8, 0.0, "", "", "interactive"]
        await portal.session(TALK, "language.summarize")
        picture = json.dumps([{"type": "input_image", "fd": 0}])
        await refused(portal, "no text", "StreamResponse", "sah(xdsss)", picture, [], options)
        await refused(portal, "is for language.sum", "StreamEmbed", "s(s)", "a", ["interactive"])
        guided = "saha(sssb)a(sss)(xds)"
        rest = [[8, 0.0, "interactive"]]
        fields = [["a", "picture", "", True]]
        await refused(portal, "kind", "StreamRespondGuided", guided, "a", [], fields, [], *rest)
        tools = [["a", "b", "{}"]]
        await refused(portal, "tools", "StreamRespondGuided", guided, "a", [], fields, tools, *rest)
        options[4] = "sometime"
        await refused(portal, "execution_mode", "StreamResponse", "sah(xdsss)", PARTS, [], options)
        options[0], options[4] = 0, "interactive"
        await refused(portal, "max_tokens", "StreamResponse", "sah(xdsss)", PARTS, [], options)
        await portal.session(TALK, "language.translate")
        options[:4] = [8, 0.0, "German", "English"]
        said = await portal.request("StreamResponse", "sah(xdsss)", TALK, PARTS, [], options)
        plain_said = await portal.request(
            "StreamResponse", "sah(xdsss)", TALK, PARTS, [], [8, 0.0, "", "", "interactive"]
        )
        assert said != plain_said, "the languages reach the model"
        with pytest.raises(BusError, match="is not served"):
            await portal.call("StreamThink", "s", "a")

    run(address, work)
    run(address, wrong)


@pytest.mark.bus
def test_only_the_frontend_may_call(address: str) -> None:
    async def work() -> None:
        connection = await Connection.connect(BusAddress.parse(address))
        try:
            with pytest.raises(BusError, match=f"only {FRONTEND}"):
                await connection.call(
                    NAME, PATH, LANGUAGE, "GetUseCaseAvailability", "ss", ["a", "language.x"]
                )
        finally:
            connection.close()

    asyncio.run(work())


def test_talks() -> None:
    assert turns("plain") == turns('[{"type":"input_text","text":"plain"}]')
    talk = [{"role": "system", "content": [{"type": "input_text", "text": "a"}]}]
    assert turns(json.dumps(talk)) == [{"role": "system", "content": "a"}]
    with pytest.raises(Refused):
        turns('[{"type":"input_audio"}]')


def test_without_a_bus(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pvrd.portal", "--session-bus", f"unix:path={tmp_path}/none"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
