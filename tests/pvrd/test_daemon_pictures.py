# SPDX-License-Identifier: Apache-2.0
"""Pictures over the bus, with fake workers: from files of all kinds, or refused."""

from __future__ import annotations

import fcntl
import os
from typing import Any

import pytest

from pvrd.bus_values import plain

pytestmark = pytest.mark.bus


def picture(caller: Any, data: bytes, **options: Any) -> Any:
    fd = os.memfd_create("picture", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, 1033, 2)
    try:
        return caller.call("Upscale", "ha{sv}", [0, caller.options(**options)], [fd])
    finally:
        os.close(fd)


def test_pictures(start: Any, callers: Any, lines: Any, tmp_path: Any) -> None:
    start()
    caller = callers()
    caller.state("gpu")
    reply = picture(caller, b"a picture")
    result, info = reply.fds.take(reply.body[0]), plain(reply.body[1])
    assert os.pread(result, 100, 0) == b"FAKEa picture"
    assert info["bytes"] == 13
    assert (info["width"], info["height"], info["format"]) == (4, 2, "png")
    assert (info["device"], info["restarts"], info["tiles"]) == ("gpu", 0, 2)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(result, b"x")
    os.close(result)
    # From an ordinary file, with a stream.
    path = tmp_path / "a file"
    path.write_bytes(b"more" * 1000)
    with path.open("rb") as file:
        file.seek(99)  # the offset is the caller's business
        body = [0, caller.options(stream=True)]
        reply = caller.call("Upscale", "ha{sv}", body, [file.fileno()])
        assert file.tell() == 99
    result = reply.fds.take(reply.body[1]["result"].value)
    got = lines(reply.fds.take(reply.body[0])).rest()
    assert [x["type"] for x in got] == ["progress", "end"]
    assert got[-1]["bytes"] == 4004
    assert os.pread(result, 5000, 0) == b"FAKE" + b"more" * 1000
    os.close(result)


def test_hostile_files(start: Any, callers: Any, tmp_path: Any, until: Any) -> None:
    daemon = start({"limits.bytes": 1000})
    caller = callers()
    caller.state("gpu")
    empty, big = tmp_path / "empty", tmp_path / "big"
    empty.touch()
    with big.open("wb") as file:
        file.truncate(10**12)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.write(unsealed, b"x")
    read_end, write_end = os.pipe()
    write_only = os.open(tmp_path / "w", os.O_WRONLY | os.O_CREAT)
    os.write(write_only, b"x")
    handles = {
        "InvalidArgument": [
            unsealed, read_end, write_only, os.open(empty, os.O_RDONLY), os.open("/", os.O_RDONLY),
            os.open(tmp_path, os.O_PATH), os.open("/dev/zero", os.O_RDONLY),
        ],
        "QuotaExceeded": [os.open(big, os.O_RDONLY)],
    }  # fmt: skip
    before = daemon.fds()
    for name, fds in handles.items():
        for fd in fds:
            for _ in range(3):
                assert caller.fails("Upscale", "ha{sv}", [0, {}], [fd])[0] == name
            os.close(fd)
    os.close(write_end)
    assert caller.fails("Upscale", "ha{sv}", [3, {}], [0])[0] == "InvalidArgument"
    until(lambda: daemon.fds() <= before)
