# SPDX-License-Identifier: Apache-2.0
"""The agent's Wayland end against a fake compositor: what is asked, and every way to fail."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pvrd.agent import meter, protocol, surface, wire
from pvrd.agent.measure import Figures
from pvrd.agent.meter import FRAMES, Meter
from pvrd.agent.surface import Stuck, Unknown
from tests.pvrd.agent.fake_compositor import ALL, FakeCompositor


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-9")
    return tmp_path / "wayland-9"


def run(work: Callable[[Meter], Awaitable[Any]], window: bool = False) -> Any:
    async def all_of_it() -> Any:
        made = Meter(window)
        try:
            return await work(made)
        finally:
            made.close()

    return asyncio.run(all_of_it())


def burst(window: bool = False) -> Figures:
    found = run(lambda made: made.burst(), window)
    assert isinstance(found, Figures)
    return found


def fails(window: bool = False) -> str:
    with pytest.raises(Unknown) as caught:
        burst(window)
    return str(caught.value)


def test_a_pixel_on_a_layer_counts_missed_refreshes(path: Path) -> None:
    with FakeCompositor(path, lambda n: 4 if n in (3, 8) else 1) as fake:
        found = burst()
    assert (found.frames, found.missed, found.refresh_hz) == (FRAMES - 1, 6, 1.0)
    asked = {name: values for _, name, values in fake.asked}
    _, _, output, layer, name = asked["get_layer_surface"]
    assert (output, layer, name) == (0, 2, "pvr-agent")
    assert asked["set_size"] == [1, 1]
    assert asked["set_input_region"] != [0], "an empty region: all input goes through"
    assert asked["create_buffer"][1:] == [0, 1, 1, 4, 0]
    assert fake.count("get_toplevel") == 0


def test_numbers_of_objects_are_used_again(path: Path) -> None:
    async def many(made: Meter) -> int:
        for _ in range(5):
            await made.burst()
        assert made._surface is not None
        return made._surface._wire._next

    with FakeCompositor(path) as fake:
        assert run(many) < 30
    assert fake.clients == 1


def test_a_window_only_where_it_was_allowed(path: Path) -> None:
    without = [name for name in ALL if name != "zwlr_layer_shell_v1"]
    with FakeCompositor(path, offers=without) as fake:
        assert "--window" in fails()
        assert fake.count("get_toplevel") == 0
        assert burst(window=True).missed == 0
        assert fake.count("get_toplevel") == 1


@pytest.mark.parametrize("lacks", ["wp_presentation", "wl_shm", "wl_compositor"])
def test_a_compositor_that_cannot_tell_is_named(path: Path, lacks: str) -> None:
    with FakeCompositor(path, offers=[name for name in ALL if name != lacks]):
        assert fails().startswith("the compositor ")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("hide", "does not show the surface"),
        ("discard", "does not show the surface"),
        ("end", "ended the connection"),
        ("error", "refuses wl_display: no such thing (3)"),
        ("garbage", "no message"),
        ("short", "a damaged wp_presentation_feedback.presented"),
        ("close", "closed by the user"),
    ],
)
def test_failures_are_sentences(
    path: Path, what: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "FRAME_S", 0.1)
    with FakeCompositor(path, lambda n: 1 if n < 2 and what != "discard" else what):
        assert says in fails()


def test_a_compositor_that_answers_nothing_is_stuck(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "FRAME_S", 0.1)
    with FakeCompositor(path, lambda n: 1 if n < 2 else "stop"), pytest.raises(Stuck):
        burst()
    monkeypatch.setattr(surface, "ANSWER_S", 0.1)
    path.unlink()
    with FakeCompositor(path, silent=True), pytest.raises(Stuck):
        burst()


def test_it_comes_again_after_the_compositor_did(path: Path) -> None:
    async def twice(made: Meter) -> Figures:
        await made.burst()
        fake.end_client()
        with pytest.raises(Unknown):
            await made.burst()
        return await made.burst()

    with FakeCompositor(path) as fake:
        assert run(twice).missed == 0
    assert fake.clients == 2


def test_a_session_without_wayland_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no compositor at" in fails()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert "XDG_RUNTIME_DIR" in fails()
    monkeypatch.delenv("WAYLAND_DISPLAY")
    monkeypatch.setenv("DISPLAY", ":0")
    assert "X11" in fails()
    assert wire.socket_path({"WAYLAND_DISPLAY": "/run/w"}) == Path("/run/w")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.binary(max_size=40))))
def test_any_bytes_end_in_a_sentence_or_in_nothing(messages: list[tuple[int, int, bytes]]) -> None:
    async def play() -> list[Any]:
        wrong: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, said: wrong.append(said))
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        spoken = wire.Wire(ours)
        registry = spoken.display.make("get_registry", protocol.REGISTRY, wire.NEW)
        registry.on["global"] = lambda name, interface, version: registry(
            "bind", name, interface, 1, spoken.display
        )
        base = spoken.proxy(protocol.WM_BASE)
        base.on["ping"] = lambda serial: base("pong", serial)
        for number, opcode, body in messages:
            size = len(body) + 8 if opcode < 3 else len(body)  # now and then a wrong one
            theirs.sendall(struct.pack("=II", number, size << 16 | opcode) + body)
        theirs.close()
        await asyncio.wait_for(spoken.lost, 30)
        spoken.close()
        return wrong

    assert asyncio.run(play()) == []
