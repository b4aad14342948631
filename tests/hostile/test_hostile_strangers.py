# SPDX-License-Identifier: Apache-2.0
"""What users see of each other: nothing. On a bus that would let them see everything."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pvrd.bus_values import plain

pytestmark = pytest.mark.bus
SECRET = "zanzibar"
VIDEO = {"width": 16, "height": 16}


def open_video(caller: Any) -> tuple[str, list[int]]:
    reply = caller.call("OpenVideo", "a{sv}", [caller.options(**VIDEO)])
    return reply.body[0], [reply.fds.take(1), reply.fds.take(0)]


def test_a_strangers_session(start: Any, callers: Any, lines: Any, stranger: Any) -> None:
    daemon = start()
    owner = callers()
    owner.state("gpu")
    video, fds = open_video(owner)
    for path in (owner.open_text(), video):
        text = owner.open_text()
        spy = stranger("spy", path, owner.connection.unique_name)
        stream = lines(owner.generate(text, f"slow {SECRET}", max_tokens=30))
        found = spy.go()
        # Somebody's session and none at all look the same, in all ways.
        assert found["there"] == found["nowhere"]
        assert {said.partition(":")[0] for said in found["there"]} == {"NoSuchSession"}
        assert not [tree for tree in found["trees"] if "session/" in tree or 'name="1"' in tree]
        if spy.uid != os.getuid():
            assert found["jobs"] == []
            for way in ("all jobs", "trace"):
                assert found[way].startswith("NotAuthorized"), found[way]
        told = [what for what in found["heard"] if "/session/" in what[0]]
        assert told == []
        assert SECRET not in str(found)
        assert stream.rest()[-1]["type"] == "end", "the owner's work goes on"
        assert plain(owner.call("GetStatistics").body[0])["sessions"] >= 2
    for fd in fds:
        os.close(fd)
    assert SECRET not in daemon.text()


def test_quotas_are_each_users_own(start: Any, callers: Any, stranger: Any) -> None:
    start({"limits.sessions": 2, "limits.fds": 8, "limits.bytes": 1 << 20})
    owner = callers()
    owner.state("gpu")
    opened = [owner.open_text() for _ in range(2)]
    name, text = owner.fails("OpenText", "a{sv}", [{}])
    assert (name, "limits.sessions is 2" in text) == ("QuotaExceeded", True)
    other = stranger("open", "3")
    said = [error.partition(":")[0] for error in other.go()]
    full = "QuotaExceeded"
    assert said == ([full] * 3 if other.uid == os.getuid() else ["", "", full])
    for path in opened:
        owner.call("Close", path=path, interface="org.pvrd.Pvrd1.TextSession")
    # Bytes: two rings do not fit, and what one took is given back.
    big = owner.options(width=256, height=256, slots=1)
    for _ in range(2):
        reply = owner.call("OpenVideo", "a{sv}", [big])
        name, text = owner.fails("OpenVideo", "a{sv}", [{**big, **owner.options(slots=8)}])
        assert (name, "limits.bytes" in text) == ("QuotaExceeded", True)
        owner.call("Close", path=reply.body[0], interface="org.pvrd.Pvrd1.VideoSession")
        reply.close()


def test_open_files_have_a_quota(start: Any, callers: Any, until: Any) -> None:
    daemon = start({"limits.fds": 8})
    owner = callers()
    owner.state("gpu")
    before = daemon.fds()
    for _ in range(3):  # what was charged is given back each time
        sessions = [open_video(owner) for _ in range(2)]
        name, text = owner.fails("OpenVideo", "a{sv}", [owner.options(**VIDEO)])
        assert (name, "limits.fds is 8" in text) == ("QuotaExceeded", True)
        for path, fds in sessions:
            owner.call("Close", path=path, interface="org.pvrd.Pvrd1.VideoSession")
            for fd in fds:
                os.close(fd)
    until(lambda: daemon.fds() <= before)


def test_files_that_a_method_does_not_want(start: Any, callers: Any, until: Any) -> None:
    """They would lie in pvrd as long as the method waits: for polkit, for minutes."""
    daemon = start()
    caller = callers()
    caller.state("gpu")
    before = daemon.fds()
    fd = os.open("/dev/null", os.O_RDONLY)
    for member, signature, body in (
        ("AddModel", "hsa{sv}", [0, "x", {}]), ("Upscale", "ha{sv}", [0, {}]),
        ("RemoveModel", "s", ["x"]), ("OpenText", "a{sv}", [{}]), ("Hold", "sa{sv}", ["x", {}]),
    ):  # fmt: skip
        name, text = caller.fails(member, signature, body, [fd] * 2)
        assert (name, "file descriptors, not 2" in text) == ("InvalidArgs", True)
    os.close(fd)
    until(lambda: daemon.fds() <= before)
