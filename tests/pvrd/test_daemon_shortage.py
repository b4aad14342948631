# SPDX-License-Identifier: Apache-2.0
"""A daemon that gets no more descriptors: each call is an error or works, and nothing leaks."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from pvrd import beside
from pvrd.bus_values import V
from pvrd.errors import OutOfMemory
from pvrd.model_files import Model
from pvrd.worker_models import Loadings

TEXT = "org.pvrd.Pvrd1.TextSession"
ALLOWED = {"OutOfMemory", "QuotaExceeded", "InvalidArgument", "Internal"}


@pytest.mark.bus
def test_without_descriptors(start: Any, callers: Any, until: Any) -> None:
    daemon = start()
    pid = daemon.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    callers().state("gpu")
    before = daemon.fds()
    picture = os.memfd_create("picture", os.MFD_ALLOW_SEALING)
    os.write(picture, b"\x89PNG" + bytes(60))
    seen = set()
    for spare in range(9):
        caller = callers()
        session = caller.open_text()
        held = max(int(fd) for fd in os.listdir(f"/proc/{pid}/fd")) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (held + spare, hard))
        calls = [
            ("OpenVideo", "a{sv}", [{"width": V("u", 8), "height": V("u", 8)}], {}),
            ("Upscale", "ha{sv}", [0, {"stream": V("b", True)}], {"fds": [picture]}),
            ("AddModel", "hsa{sv}", [0, "x", {"stream": V("b", True)}], {"fds": [picture]}),
            ("Generate", "sa{sv}", ["a", {}], {"path": session, "interface": TEXT}),
        ]
        for name, signature, body, more in calls:
            try:
                caller.call(name, signature, body, **more).fds.close()
            except Exception as error:
                seen.add(str(getattr(error, "name", error)).rpartition(".")[2])
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        caller.connection.close()
        until(lambda: daemon.fds() <= before)
    os.close(picture)
    assert "OutOfMemory" in seen
    assert seen <= ALLOWED
    assert callers().open_text()


def test_a_model_that_cannot_be_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is OutOfMemory, whichever descriptor is not to be had, and nobody waits for it later."""
    path = tmp_path / "a.pvrm"
    path.touch()
    model = Model("a", "text", path, 0, "file", "key")

    def none(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def begin() -> None:
        loadings = Loadings()
        with pytest.raises(OutOfMemory, match="Too many open files"):
            await loadings.begin(model, "", none).future
        assert not loadings
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", none)
            with pytest.raises(OutOfMemory):
                await loadings.begin(model, "", lambda *_: None).future
        assert not loadings
        await beside.done(model.lane, lambda: None)  # what was opened is closed

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(begin())
    assert len(os.listdir("/proc/self/fd")) == before
