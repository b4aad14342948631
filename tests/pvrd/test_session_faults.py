# SPDX-License-Identifier: Apache-2.0
"""A fault of pvrd's own in what serves a session: its client is told, and does not wait in vain."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pvrd.errors import PvrdError
from pvrd.text_session import TextSession
from pvrd.video_session import VideoSession


def broken(*_: Any) -> Any:
    raise KeyError("not foreseen")


def test_of_video(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[PvrdError] = []
    session = object.__new__(VideoSession)
    session.__dict__.update(_turn=asyncio.Event(), _steer=broken, _fail=told.append)
    asyncio.run(session._run())
    (error,) = told
    assert error.name == "Internal"
    said = capfd.readouterr().err
    assert "KeyError at test_session_faults.py" in said
    assert "not foreseen" not in said


def test_of_text(capfd: pytest.CaptureFixture[str]) -> None:
    told: dict[str, str] = {}
    session = object.__new__(TextSession)
    core = SimpleNamespace(precision=SimpleNamespace(fitting=broken))
    session.__dict__.update(core=core, model=None, set=told.update)
    asyncio.run(session._load())
    assert told["error"].startswith("Internal: ")
    assert "KeyError at test_session_faults.py" in capfd.readouterr().err
