# SPDX-License-Identifier: Apache-2.0
"""Parts of the daemon without a bus: streams with a fake clock, layouts, configuration, polkit."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pvrd import beside, config, journal, link, polkit
from pvrd.bus import BusAddress, BusError
from pvrd.bus_values import V, plain, variant
from pvrd.config import Config, ConfigError, Paths
from pvrd.errors import NAMES, Internal, InvalidArgument, NotAuthorized, SlowReader, from_name
from pvrd.options import TEXT_JOB, parse
from pvrd.stream import LINE, LineStream, failure, pieces
from pvrd.video_layout import Format, lay_out, plan

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    """Time that passes only while somebody waits; then `while_waiting` runs."""

    def __init__(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        self.now = 0.0
        self.while_waiting = while_waiting

    def __call__(self) -> float:
        return self.now

    async def pause(self, seconds: float) -> None:
        self.now += seconds
        self.while_waiting()
        await asyncio.sleep(0)


def test_slow_reader_leaves_room_for_the_last_line() -> None:
    async def main() -> None:
        clock = Clock()
        stream = LineStream(60, lambda: None, clock, clock.pause)
        reader, stream.reader = stream.reader, -1
        count = 0
        slow = ""
        while not slow:
            try:
                await stream.room()
            except SlowReader as e:
                slow = str(e)
                break
            stream.write("token", {"n": count, "text": "x" * (37 * count % 3700)})
            count += 1
        assert "60 s" in slow
        assert 59 < clock.now < 61
        assert count > 5
        # Moves of a job and the last line still fit, at once.
        for _ in range(3):
            stream.write("device", {"reason": "y" * 300})
        before = clock.now
        await stream.finish(failure(Internal("z" * 500)))
        assert clock.now == before
        data = b""
        while piece := os.read(reader, 1 << 16):
            data += piece
        os.close(reader)
        got = [json.loads(line) for line in data.splitlines()]
        assert [line["seq"] for line in got] == list(range(count + 4))
        assert got[-1]["type"] == "error"

    asyncio.run(main())


def test_reader_that_reads_a_little_is_not_slow() -> None:
    async def main() -> None:
        stream: LineStream
        clock = Clock(lambda: (os.read(reader, 100), None)[1])
        stream = LineStream(1.0, lambda: None, clock, clock.pause)
        reader, stream.reader = stream.reader, -1
        for n in range(300):
            await stream.room()
            stream.write("token", {"n": n, "text": "x" * 200})
        assert clock.now > 2.0
        os.close(reader)
        stream.close()

    asyncio.run(main())


def test_gone_reader() -> None:
    async def main() -> None:
        gone: list[bool] = []
        stream = LineStream(60, lambda: gone.append(True))
        reader, stream.reader = stream.reader, -1
        os.close(reader)
        await asyncio.sleep(0)
        stream.write("token", {})
        await stream.room()
        await stream.finish(("end", {}))
        assert gone == [True]

    asyncio.run(main())


@pytest.mark.parametrize("text", ["", "a", "\x01" * 5000, "\U0001f600" * 2000, '"\\' * 3000])
def test_pieces_fit(text: str) -> None:
    assert "".join(pieces(text)) == text
    assert pieces(text)
    for piece in pieces(text):
        assert len(json.dumps({"text": piece}, ensure_ascii=False).encode()) < LINE - 600


def test_layout() -> None:
    # The example of docs/architecture.md.
    layout = lay_out(Format(8, 6, "i420"), Format(16, 12, "i420"), 3)
    assert [tuple(vars(p).values()) for p in layout.input] == [
        (0, 64, 8, 6), (384, 64, 4, 3), (576, 64, 4, 3),
    ]  # fmt: skip
    assert [tuple(vars(p).values()) for p in layout.output] == [
        (4096, 64, 16, 12), (4864, 64, 8, 6), (5248, 64, 8, 6),
    ]  # fmt: skip
    assert (layout.slot_bytes, layout.ring_bytes) == (8192, 3 * 8192)
    nv12 = lay_out(Format(7, 5, "nv12", 16), Format(21, 15, "nv12", 16), 1)
    assert [tuple(vars(p).values()) for p in nv12.input] == [(0, 64, 7, 5), (320, 64, 8, 3)]
    assert nv12.output[0].width == 21
    one = Format(1, 1, "gray")
    assert len(lay_out(one, one, 1).input) == 1
    full = Format(5, 1, "i444")
    assert [p.width for p in lay_out(full, full, 1).input] == [5, 5, 5]


def test_plan_follows_the_quota() -> None:
    given = {"width": 64, "height": 64, "pixel": "i420", "depth": 8, "siting": "left",
             "full_range": False, "scale": 2.0, "out_width": None, "out_height": None,
             "slots": None}  # fmt: skip
    whole = plan(given, 1 << 30)
    assert whole.slots == 4
    assert plan(given, 2 * whole.slot_bytes + 5).slots == 2
    assert plan(given, 0).slots == 1
    assert plan({**given, "slots": 7}, 0).slots == 7


def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "etc", tmp_path / "state", tmp_path / "cache")


def test_configuration_files_in_order(tmp_path: Path) -> None:
    where = paths(tmp_path)
    (where.config / "pvrd.toml.d").mkdir(parents=True)
    first = "[cpu]\nthreads = 1\n[gpu]\nenabled = false\n[x]\ny = 1\n"
    (where.config / "pvrd.toml").write_text(first)
    (where.config / "pvrd.toml.d" / "10.toml").write_text("[cpu]\nthreads = 2\n")
    (where.config / "pvrd.toml.d" / "20.toml").write_text("[cpu]\nthreads = 3\n")
    got = config.load(where)
    assert (got.whole("cpu.threads"), got.flag("gpu.enabled")) == (3, False)
    assert got.warnings == (f"{where.config}/pvrd.toml: there is no key x.y",)
    config.store(where, {"cpu.threads": 4, "models.text": 'a "quoted" näme'})
    config.store(where, {"models.keep_s": 1.5})
    got = config.load(where)
    assert (got.whole("cpu.threads"), got.text("models.text")) == (4, 'a "quoted" näme')
    assert got.number("models.keep_s") == 1.5
    only = tmp_path / "only.toml"
    only.write_text("[cpu]\nthreads = 9\n")
    assert config.load(where, only).flag("gpu.enabled")


@pytest.mark.parametrize(
    "line",
    ["cpu.threads = -1", "cpu.threads = 1.5", "cpu.threads = true", "gpu.enabled = 1",
     "limits.slow_reader_s = nan", "limits.slow_reader_s = 0", "models.paths = 'x'",
     "models.text = 3", "debug.faults = [1]", "debug.faults = ['cpu:melt']",
     "limits.sessions = 0", "video.tile = 1" + 400 * "0",
     "deadlines.slice_s = inf", "gpu = 1", "deadlines.ping_s = 1" + 400 * "0"],
)  # fmt: skip
def test_bad_values(line: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match=line.split(" ")[0]):
        config.load(paths(tmp_path), file)


def test_a_value_out_of_range_is_shown_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("limits.sessions = 99999999999999999999999\n")
    with pytest.raises(ConfigError, match=r"lies in 1 to 1024, not 99999999999999999999999$"):
        config.load(paths(tmp_path), file)
    file.write_text(f"limits.sessions = {5000 * '9'}\n")
    with pytest.raises(ConfigError, match=r"c\.toml"):
        config.load(paths(tmp_path), file)


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "{a = " * 5000])
def test_a_file_nested_too_deeply(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.toml: it is nested too deeply$"):
        config.load(paths(tmp_path), file)


def test_places() -> None:
    system = Paths.find(True, {"STATE_DIRECTORY": "/s/a:/s/b"})
    assert (str(system.config), str(system.models)) == ("/etc/pvrd", "/s/a/models")
    user = Paths.find(False, {"HOME": "/h", "XDG_STATE_HOME": "/st", "XDG_CACHE_HOME": "relative"})
    assert (str(user.config), str(user.state)) == ("/h/.config/pvrd", "/st/pvrd")
    assert str(user.cache) == "/h/.cache/pvrd"
    assert Path("/usr/share/pvrd/models") in user.shared_models


def test_errors_are_the_list_of_the_docs() -> None:
    table = (ROOT / "docs" / "api.md").read_text().split("## Errors")[1].split("Beside these")[0]
    listed = {row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")}
    assert listed - {"NAME"} == set(NAMES)
    assert type(from_name("Busy", "x")).__name__ == "Busy"
    assert type(from_name("Whatever\n", "x")).__name__ == "Internal"
    assert "\n" not in str(from_name("Busy", "a\nb\x1b[0m"))


def test_configuration_keys_are_in_the_docs() -> None:
    text = (ROOT / "docs" / "api.md").read_text().split("## Configuration")[1]
    for key in config.KEYS:
        section, _, name = key.partition(".")
        assert f"{section}." in text
        assert name in text, key


def test_options() -> None:
    got = parse({"temperature": V("i", 1), "stop": V("as", ["a"])}, TEXT_JOB)
    assert (got["temperature"], got["stop"], got["max_tokens"]) == (1.0, ["a"], 256)
    with pytest.raises(InvalidArgument, match="max_tokenz"):
        parse({"max_tokenz": V("u", 1)}, TEXT_JOB)
    with pytest.raises(InvalidArgument, match="lies in 1 to 1048576, not 18446744073709551615"):
        parse({"max_tokens": V("t", (1 << 64) - 1)}, TEXT_JOB)
    assert parse({"logit_bias": V("a{ud}", {7: -1.5})}, TEXT_JOB)["logit_bias"] == {"7": -1.5}
    for bad in (V("a{ud}", {7: 1e9}), V("a{sd}", {"7": 1.0}), V("as", ["7"])):
        with pytest.raises(InvalidArgument, match="logit_bias"):
            parse({"logit_bias": bad}, TEXT_JOB)
    with pytest.raises(InvalidArgument, match=r"lies in 0 to 1, not -0\.1"):
        parse({"top_p": V("d", -0.1)}, TEXT_JOB)
    assert plain(variant({"a": [1, "b"], "c": None, "d": {"e": -1.5}})) == {
        "a": [1, "b"], "d": {"e": -1.5},
    }  # fmt: skip


def test_journal() -> None:
    record = journal.Journal({"kind": "generate", "prompt": "é" * 3000, "settings": {}})
    assert record.header_bytes == 8192
    for token in (5, -1, 2**31 - 1):
        record.append(token)
    data = os.pread(record.reader, 1 << 20, 0)
    assert json.loads(data[:8192])["prompt"] == "é" * 3000
    assert data[8191:8192] == b"\n"
    assert data[8192:] == b"\5\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(record.reader, b"x")
    record.close()


class FakeBus:
    """Answers CheckAuthorization."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(args)
        if isinstance(self.answer, Exception):
            raise self.answer

        class Reply:
            body = (self.answer,)

            def close(self) -> None:
                pass

        return Reply()


def test_polkit() -> None:
    def check(kind: Any, answer: Any, uid: int) -> FakeBus:
        bus = FakeBus(answer)
        decider = polkit.Polkit(bus, BusAddress(kind, ""))  # type: ignore[arg-type]
        asyncio.run(decider.check(":1.5", uid, polkit.MODELS))
        return bus

    assert check("user", None, os.getuid()).asked == []
    with pytest.raises(NotAuthorized):
        check("private", None, os.getuid() + 1)
    asked = check("system", [True, False, {}], 1000).asked[0]
    assert asked[3] == "CheckAuthorization"
    assert asked[5][0][0] == "system-bus-name"
    assert plain(asked[5][0][1]) == {"name": ":1.5"}
    assert asked[5][1] == "org.pvrd.Pvrd1.manage-models"
    with pytest.raises(NotAuthorized, match="administrator"):
        check("system", [False, True, {}], 0)
    with pytest.raises(NotAuthorized, match="cannot be asked"):
        check("system", BusError("x.y", "no polkit"), 0)


def test_polkit_actions_are_in_the_policy() -> None:
    policy = (ROOT / "dbus" / "org.pvrd.Pvrd1.policy").read_text()
    for action in (polkit.PRIORITY, polkit.MODELS, polkit.CONFIGURE):
        assert f'"{action}"' in policy


def test_the_control_process_imports_no_engine() -> None:
    code = (
        "import sys, pvrd.__main__, pvrd.workers.protocol\n"
        "bad = {'numpy', 'engine', 'kernels', 'vulkan', 'jinja2', 'PIL'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_worker_is_ours_in_whatever_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pvrd").mkdir()
    (tmp_path / "pvrd/__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)

    async def main() -> str:
        ours, process = await link.spawn("cpu", ())
        ours.close()
        return await asyncio.wait_for(process.ended, 60)

    assert asyncio.run(main()).startswith("it ended")
    assert not (tmp_path / "ran").exists()


def test_the_loop_runs_while_the_kernel_executes_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And one that comes when it is not wanted any more is ended."""
    real, begun, wake = subprocess.Popen, threading.Event(), threading.Event()
    made: list[Any] = []

    def slow(*args: Any, **more: Any) -> Any:
        begun.set()
        assert wake.wait(60)
        made.append(real(*args, **more))
        return made[0]

    monkeypatch.setattr(subprocess, "Popen", slow)

    async def main() -> None:
        program = (sys.executable, "-c", "import signal; signal.pause()")
        work = asyncio.create_task(link.spawn("cpu", program))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert not work.done()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        wake.set()
        for _ in range(2):  # until it is made, then until it is ended
            await beside.done("cpu worker", lambda: None)

    asyncio.run(main())
    assert made[0].returncode is not None


def test_one_file_owns_each_library() -> None:
    owners = {"dbus_next": "bus.py", "systemd.daemon": "systemd.py"}
    for path in (ROOT / "pvrd").rglob("*.py"):
        text = path.read_text()
        if path.name != owners["dbus_next"]:
            assert "from dbus_next" not in text
            assert "import dbus_next" not in text
        if path.name != "systemd.py":
            assert "from systemd import" not in text


def test_config_value() -> None:
    assert Config({"cpu.threads": 3}).whole("cpu.threads") == 3
