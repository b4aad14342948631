# SPDX-License-Identifier: Apache-2.0
"""What users say and are told stays out of logs and off the disk, however a job ends; and one
user's prompts are no other's head start.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pvrd.bus_values import V
from pvrd.errors import PvrdError
from tests.daemons import Daemon
from tests.e2e.conftest import models  # noqa: F401  (a fixture)

pytestmark = pytest.mark.bus
SECRET = "zanzibar-7391"
TEXT = "org.pvrd.Pvrd1.TextSession"


def written(folder: Path) -> list[Path]:
    """Files below a folder that hold the secret, in whatever coding of the usual ones."""
    forms = [SECRET.encode(), SECRET.encode("utf-16-le"), SECRET.encode().hex().encode()]
    return [
        path for path in folder.rglob("*")
        if path.is_file() and any(form in path.read_bytes() for form in forms)
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["", "slow", "die:2", "die-always:1", "stop:2", "nonsense:2",
                                 "suspect:3", "oom:gpu", "wide"])  # fmt: skip
def test_no_end_of_a_job_tells(start: Any, callers: Any, lines: Any, end: str) -> None:
    running = start({"deadlines.ping_s": 0.2, "deadlines.slice_s": 0.5})
    caller = callers()
    caller.state("gpu")
    session = caller.open_text()
    stream = lines(caller.generate(session, f"{SECRET} {end}", max_tokens=5, stop=[SECRET]))
    assert stream.rest()[-1]["type"] in ("end", "error")
    assert SECRET not in running.text()
    assert written(running.folder) == []


def test_no_wrong_call_tells(start: Any, callers: Any, until: Any) -> None:
    running = start()
    caller = callers()
    caller.state("gpu")
    session = caller.open_text()
    for member, signature, body in (
        ("Chat", "aa{ss}a{sv}", [[{"role": SECRET, "content": SECRET}], {}]),
        ("Generate", "sa{sv}", [SECRET, {SECRET: V("s", SECRET)}]),
        ("Generate", "sa{sv}", [SECRET, {"temperature": V("s", SECRET)}]),
        ("Extract", "ssa{sv}", [SECRET, SECRET, {"max_tokens": V("u", 1)}]),
        ("Classify", "sasa{sv}", [SECRET, [SECRET], {}]),
        ("Embed", "asa{sv}", [[SECRET] * 2000, {}]),
        (SECRET.replace("-", "_"), "s", [SECRET]),
    ):  # fmt: skip
        caller.fails(member, signature, body, path=session, interface=TEXT)
    fd = caller.generate(session, f"{SECRET} slow", max_tokens=100000)
    os.close(fd)  # a reader that leaves
    until(lambda: caller.get("Ready", session, TEXT))
    assert SECRET not in running.text()
    assert written(running.folder) == []


def test_real_workers_tell_nothing_and_share_nothing(tmp_path: Path, models: Path) -> None:  # noqa: F811
    """Answered, killed in the middle, refused: by the real daemon and its real CPU worker. Nor does
    a prompt that another caller's session has just read come any cheaper.
    """
    settings = {"max_tokens": 4, "temperature": 0.0}
    prompt = f"{SECRET} w1 w2 w3 w4 w5 w6"
    with Daemon(tmp_path, models, {"gpu.enabled": False}) as running, running.client() as client:
        worker = running.ready(client, "cpu")
        read = []
        with running.client() as other:
            for one in (client, other, other):
                with one.open_text({"model": "tiny", "context": 200}) as session:
                    events = list(session.generate(prompt, settings))
                    read.append(events[-1]["stats"]["prefill_tokens"])
                    counted = events[0]["prompt_tokens"]
            assert read == [counted] * 3
        with client.open_text({"model": "tiny", "context": 200}) as session:
            stream = iter(session.generate(prompt, {**settings, "max_tokens": 100}))
            next(stream)
            os.kill(worker["pid"], signal.SIGKILL)
            assert list(stream)[-1]["type"] == "end"
            with pytest.raises(PvrdError):
                list(session.generate(SECRET * 200, settings))
            with pytest.raises(PvrdError):
                list(session.generate(prompt, {**settings, "schema": SECRET}))
    assert SECRET not in running.log.read_text()
    assert written(tmp_path) == []
