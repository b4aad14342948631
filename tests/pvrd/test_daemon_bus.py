# SPDX-License-Identifier: Apache-2.0
"""The daemon among strangers: nonsense, floods, others' sessions, lost callers."""

from __future__ import annotations

import asyncio
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import pvrd.bus
from pvrd import __version__
from pvrd.bus import BusAddress, BusError
from pvrd.bus_values import V, plain
from pvrd.manager import Manager
from pvrd.objects import interface_xml
from pvrd.text_session import TextSession
from pvrd.video_session import VideoSession

pytestmark = pytest.mark.bus
ROOT = Path(__file__).resolve().parents[2]
TEXT = "org.pvrd.Pvrd1.TextSession"
PROPERTIES = "org.freedesktop.DBus.Properties"
INTROSPECTABLE = "org.freedesktop.DBus.Introspectable"


@pytest.fixture(scope="module")
def daemon(start: Any) -> Any:
    return start()


def shape(interface: ET.Element) -> dict[str, Any]:
    """What an interface promises."""
    out: dict[str, Any] = {}
    for child in interface:
        key = (child.tag, child.attrib["name"])
        out[str(key)] = [
            child.attrib.get("type"), child.attrib.get("access"),
            [(a.attrib["name"], a.attrib["type"], a.attrib["direction"]) for a in child],
        ]  # fmt: skip
    return out


def test_introspection_is_the_interface_files(daemon: Any, caller: Any) -> None:
    session = caller.open_text()
    for path, cls in (("/org/pvrd/Pvrd1", Manager), (session, TextSession), ("", VideoSession)):
        file = ET.parse(ROOT / "dbus" / f"{cls.INTERFACE}.xml").getroot().find("interface")
        assert file is not None
        live = ET.fromstring(interface_xml(cls))
        if path:
            xml = caller.call("Introspect", path=path, interface=INTROSPECTABLE).body[0]
            found = ET.fromstring(xml).find(f"interface[@name='{cls.INTERFACE}']")
            assert found is not None
            live = found
        assert file.attrib["name"] == live.attrib["name"] == cls.INTERFACE
        assert shape(file) == shape(live)


def test_introspection_finds_the_way(daemon: Any, caller: Any, callers: Any) -> None:
    session = caller.open_text()
    path = "/"
    for part in session.strip("/").split("/"):
        xml = caller.call("Introspect", path=path, interface=INTROSPECTABLE).body[0]
        assert part in [n.attrib["name"] for n in ET.fromstring(xml).findall("node")]
        path = f"{path.rstrip('/')}/{part}"
    # Another caller does not even see that there is one.
    other = callers()
    xml = other.call("Introspect", path=os.path.dirname(session), interface=INTROSPECTABLE).body[0]
    assert not ET.fromstring(xml).findall("node")


def test_properties_of_the_manager(daemon: Any, caller: Any) -> None:
    caller.state("gpu")
    reply = caller.call("GetAll", "s", ["org.pvrd.Pvrd1.Manager"], interface=PROPERTIES)
    values = plain(reply.body[0])
    assert values["Version"] == __version__
    assert values["Protocols"] == {"text-stream": 1, "slot-socket": 1}
    assert (values["State"], values["Reason"]) == ("gpu", "")
    gpu, cpu = values["Devices"]
    assert (gpu["kind"], gpu["name"], gpu["state"]) == ("gpu", "Fake gpu", "ready")
    assert gpu["present"]
    assert (cpu["kind"], cpu["software"], cpu["features"]) == ("cpu", True, ["fp16"])
    assert gpu["limits"] == {"max_storage_range": 1 << 27}
    caller.call("Ping", interface="org.freedesktop.DBus.Peer", path="/any/where")


@pytest.mark.parametrize(
    ("member", "signature", "body", "name", "word"),
    [
        ("Nonsense", "", [], "UnknownMethod", "Nonsense"),
        ("OpenText", "s", ["x"], "InvalidArgs", "a{sv}"),
        ("OpenText", "a{sv}", [{"modle": V("s", "x")}], "InvalidArgument", "modle"),
        ("OpenText", "a{sv}", [{"priority": V("s", "x")}], "InvalidArgument", "priority"),
        ("OpenText", "a{sv}", [{"priority": V("u", 16)}], "InvalidArgument", "priority"),
        ("OpenText", "a{sv}", [{"priority": V("b", True)}], "InvalidArgument", "priority"),
        ("OpenText", "a{sv}", [{"context": V("d", float("nan"))}], "InvalidArgument", "context"),
        ("OpenText", "a{sv}", [{"context": V("x", -1)}], "InvalidArgument", "context"),
        ("OpenText", "a{sv}", [{"device": V("s", "tpu")}], "InvalidArgument", "tpu"),
        ("OpenText", "a{sv}", [{"device": V("a{sv}", {})}], "InvalidArgument", "device"),
        ("OpenText", "a{sv}", [{"model": V("s", "fake-txet")}], "UnknownModel", "fake-text"),
        ("OpenText", "a{sv}", [{"model": V("s", "/etc/passwd")}], "InvalidArgument", "path"),
        ("OpenText", "a{sv}", [{"model": V("s", "A/x.gguf")}], "InvalidArgument", "path"),
        ("OpenText", "a{sv}", [{"model": V("s", "Ünïcode")}], "InvalidArgument", "a-z"),
        ("OpenText", "a{sv}", [{"model": V("s", "fake-x2")}], "UnsupportedModel", "video"),
        ("OpenVideo", "a{sv}", [{}], "InvalidArgument", "width"),
        ("OpenVideo", "a{sv}", [{"width": V("u", 0)}], "InvalidArgument", "width"),
        ("OpenVideo", "a{sv}", [{"height": V("u", 99999)}], "InvalidArgument", "height"),
        ("SetConfig", "a{sv}", [{"no.key": V("u", 0)}], "InvalidArgument", "no.key"),
        ("SetConfig", "a{sv}", [{"workers.program": V("as", ["x"])}], "InvalidArgument", "file"),
        ("SetConfig", "a{sv}", [{"cpu.threads": V("s", "x")}], "InvalidArgument", "cpu.threads"),
        ("SetConfig", "a{sv}", [{"models.text": V("s", "a b")}], "InvalidArgument", "model's name"),
        ("RemoveModel", "s", ["../../etc"], "InvalidArgument", "path"),
        ("RemoveModel", "s", ["nothing"], "UnknownModel", "nothing"),
        ("RemoveModel", "s", ["fake-text"], "InvalidArgument", "not added"),
    ],
)  # fmt: skip
def test_nonsense_gets_a_named_error(
    daemon: Any, caller: Any, member: str, signature: str, body: Any, name: str, word: str
) -> None:
    got, text = caller.fails(member, signature, body)
    assert got == name
    assert word in text


def test_wrong_paths_interfaces_properties(daemon: Any, caller: Any) -> None:
    assert caller.fails("X", path="/nowhere")[0] == "UnknownObject"
    none = "/org/pvrd/Pvrd1/session/99"
    assert caller.fails("Close", path=none, interface=TEXT)[0] == "NoSuchSession"
    assert caller.fails("X", interface="a.b")[0] == "UnknownInterface"
    manager = "org.pvrd.Pvrd1.Manager"
    for member, signature, body, name in [
        ("Get", "ss", [manager, "Nope"], "UnknownProperty"),
        ("Get", "ss", ["a.b", "State"], "UnknownInterface"),
        ("Get", "s", [manager], "InvalidArgs"),
        ("Set", "ssv", [manager, "State", V("s", "x")], "PropertyReadOnly"),
        ("Frob", "", [], "UnknownMethod"),
    ]:
        assert caller.fails(member, signature, body, interface=PROPERTIES)[0] == name


def test_wrong_talks(daemon: Any, caller: Any) -> None:
    session = caller.open_text()
    talks: list[Any] = [
        [], [{}], [{"role": "user"}], [{"role": "god", "content": "x"}],
        [{"role": "user", "content": "x", "more": "y"}],
    ]  # fmt: skip
    for messages in talks:
        got = caller.fails("Chat", "aa{ss}a{sv}", [messages, {}], path=session, interface=TEXT)
        assert got[0] == "InvalidArgument"
    for options in ({"stop": V("as", [""])}, {"stop": V("s", "x")}, {"stop": V("as", ["x"] * 9)},
                    {"temperature": V("d", float("inf"))}, {"max_tokens": V("u", 0)},
                    {"seed": V("x", -1)}):  # fmt: skip
        got = caller.fails("Generate", "sa{sv}", ["x", options], path=session, interface=TEXT)
        assert got[0] == "InvalidArgument"
    got = caller.fails("Generate", "sa{sv}", ["", {}], path=session, interface=TEXT)
    assert got[0] == "InvalidArgument"


def test_another_callers_session(daemon: Any, caller: Any, callers: Any) -> None:
    session = caller.open_text()
    other = callers()
    calls = [
        ("Generate", "sa{sv}", ["x", {}], TEXT), ("Close", "", [], TEXT),
        ("GetAll", "s", [TEXT], PROPERTIES), ("Introspect", "", [], INTROSPECTABLE),
    ]  # fmt: skip
    for member, signature, body, interface in calls:
        got = other.fails(member, signature, body, path=session, interface=interface)
        assert got[0] == "NoSuchSession"
    assert caller.get("Model", session, TEXT) == "fake-text"


def test_signals_go_to_the_owner_alone(start: Any, callers: Any, until: Any) -> None:
    start(arguments=["--slow-load", "0.2"])
    owner, other = callers(), callers()
    heard: dict[str, list[Any]] = {"owner": [], "other": []}
    for who, client in (("owner", owner), ("other", other)):
        client.run(client.connection.subscribe(heard[who].append, interface=PROPERTIES))
    owner.state("gpu")
    session = owner.open_text()

    def about() -> list[Any]:
        owner.get("Ready", session, TEXT)
        return [s for s in heard["owner"] if s.path == session and plain(s.body[1]).get("Ready")]

    until(about)
    other.get("State")
    assert not [s for s in heard["other"] if s.path == session]


def test_sessions_end_with_their_caller(start: Any, callers: Any, lines: Any, until: Any) -> None:
    daemon = start()
    watcher = callers()
    watcher.state("gpu")
    before = daemon.fds()
    for _ in range(3):
        client = callers()
        for _ in range(2):
            client.open_text()
        stream = lines(client.generate(client.open_text(), "slow", max_tokens=100000))
        stream.next()
        client.connection.close()
        until(lambda: plain(watcher.call("GetStatistics").body[0])["sessions"] == 0)
        assert stream.rest()[-1]["error"] == "Cancelled"
    until(lambda: daemon.fds() <= before)


def test_floods(start: Any, callers: Any, until: Any) -> None:
    daemon = start()
    caller = callers()
    caller.state("gpu")
    session = caller.open_text()
    body = ["x" * (2 << 20), {}]
    name, _ = caller.fails("Generate", "sa{sv}", body, path=session, interface=TEXT)
    assert name == "LimitsExceeded"
    before = daemon.fds()
    for _ in range(50):
        fds = [0] * 16
        assert caller.fails("ListModels", "ah", [list(range(16))], fds)[0] == "InvalidArgs"
    until(lambda: daemon.fds() <= before)

    # A thousand calls at once: each is answered, some with LimitsExceeded.
    async def flood() -> list[Any]:
        calls = [
            caller.connection.call("org.pvrd.Pvrd1", "/org/pvrd/Pvrd1", "org.pvrd.Pvrd1.Manager", m)
            for m in ["ListModels", "GetDiagnostics"] * 500
        ]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    answers = caller.run(flood())
    errors = {a.name.rsplit(".", 1)[1] for a in answers if isinstance(a, BusError)}
    assert errors <= {"LimitsExceeded"}
    assert len([a for a in answers if not isinstance(a, Exception)]) >= 64
    assert caller.get("State") == "gpu"


def test_seventeen_fds_cut_off_the_caller_alone(start: Any, callers: Any, bus: str) -> None:
    daemon = start()
    caller, hostile = callers(), callers()
    limit, pvrd.bus.MAX_FDS = pvrd.bus.MAX_FDS, 100
    try:
        with pytest.raises(BusError):
            hostile.call("Upscale", "ah", [list(range(17))], [0] * 17)
    finally:
        pvrd.bus.MAX_FDS = limit
    assert caller.get("Version") == __version__
    assert daemon.process.poll() is None


def test_shares_and_quota_of_jobs(start: Any, callers: Any, lines: Any) -> None:
    start({"limits.queue": 2})
    caller = callers()
    caller.state("gpu")
    caller.open_text(share=60)
    name, text = caller.fails("OpenText", "a{sv}", [caller.options(share=50)])
    assert (name, "60" in text) == ("Busy", True)
    sessions = [caller.open_text() for _ in range(2)]
    streams = [lines(caller.generate(path, "slow", max_tokens=9999)) for path in sessions]
    session = caller.open_text()
    got = caller.fails("Generate", "sa{sv}", ["x", {}], path=session, interface=TEXT)
    assert (got[0], "wait" in got[1]) == ("Busy", True)
    for stream in streams:
        os.close(stream.fd)


def test_bus_addresses() -> None:
    both = BusAddress.parse("unix:path=/a%20b,guid=1;unix:abstract=/c")
    assert both.sockets() == ["/a b", "\0/c"]
    with pytest.raises(BusError):
        BusAddress.parse("tcp:host=x")
