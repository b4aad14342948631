# SPDX-License-Identifier: Apache-2.0
"""Kernels that are wrong, hang the compiler or abort it: caught, put aside and survived."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kernels
from kernels import build_spirv
from pvrd.client import Client
from pvrd.errors import DeviceLost
from tests.buses import ROOT
from tests.daemons import Daemon
from tests.e2e.test_e2e_text import TOKENS, answer, session, text, tokens
from tests.e2e.test_e2e_video import enlarged, picture, play

pytestmark = [pytest.mark.bus, pytest.mark.gpu]

EOS = 2  # the token of the model that ends an answer
Start = Callable[..., Daemon]
Plant = Callable[[str, str, str], None]
CONFIG: dict[str, Any] = {"gpu.allow_software": True, "workers.backoff_s": 0.1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, models: Path) -> list[dict[str, Any]]:
    """The answer on a CPU."""
    with (
        Daemon(tmp_path_factory.mktemp("right"), models, {}) as daemon,
        daemon.client() as client,
        session(client, "cpu") as where,
    ):
        return answer(where)


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """plant(op, old, new): daemons use kernels whose source of `op` has `new` instead of `old`."""
    whole = kernels.artifacts()
    folder, root = tmp_path / "kernels", tmp_path / "source"
    folder.mkdir()
    for file in whole.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    shutil.copytree(ROOT / "kernels" / "include", root / "kernels" / "include")
    monkeypatch.setenv("PVRD_KERNELS", str(folder))

    def change(op: str, old: str, new: str) -> None:
        shutil.copytree(ROOT / "kernels" / op, root / "kernels" / op)
        source = root / "kernels" / op / "op.comp"
        before = source.read_text()
        assert old in before
        source.write_text(before.replace(old, new))
        manifest = json.loads((folder / "manifest.json").read_text())
        contract = kernels.op(op)
        for variant in contract.variants:
            entry = manifest[op][variant.name]
            target = folder / entry["file"]
            target.unlink()
            build_spirv.compile_variant(root, contract, variant, target)
            entry["sha256"] = hashlib.sha256(target.read_bytes()).hexdigest()
        (folder / "manifest.json").unlink()
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return change


SWIGLU = ("swiglu", "push.act);", "push.act) + ({} ? 0.5 : 0.0);")


def wrong_when(plant: Plant, condition: str) -> None:
    op, old, new = SWIGLU
    plant(op, old, new.format(condition))


def quarantined(running: Daemon, client: Client) -> dict[str, str]:
    return dict(running.device(client, "gpu").get("quarantined") or {})


def diagnosis(client: Client, name: str) -> str:
    """What GetDiagnostics, and so the doctor, says about a kernel."""
    (found,) = [f for f in client.diagnostics() if name in f["message"]]
    assert (found["topic"], found["status"], found["code"]) == ("gpu", "warning", "quarantined")
    return str(found["message"])


def doctor(running: Daemon, check: str) -> dict[str, str]:
    """What `pvrctl doctor` finds in a check."""
    done = subprocess.run(
        [sys.executable, "-c", "import pvrd.ctl.main as m; raise SystemExit(m.main())",
         "--bus", running.address, "--json", "doctor"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (found,) = [f for f in json.loads(done.stdout) if f["check"] == check]
    return {key: found[key] for key in ("what", "why")}


def test_wrong_in_the_self_test(daemon: Start, plant: Plant, undisturbed: Any) -> None:
    wrong_when(plant, "true")
    running = daemon(CONFIG)
    with running.client() as client:
        running.ready(client, "gpu")
        with session(client) as where:
            events = answer(where)
        assert tokens(events) == tokens(undisturbed)
        assert text(events) == text(undisturbed)
        assert events[-1]["device"] == "cpu"
        assert list(quarantined(running, client)) == ["swiglu.base"]
        assert "of h is wrong" in diagnosis(client, "swiglu.base")
        assert "swiglu.base" in events[0]["reason"]
        with session(client, "gpu") as where, pytest.raises(DeviceLost, match=r"swiglu\.base"):
            answer(where)
        assert running.device(client, "gpu")["generation"] == 1


def test_wrong_at_one_size_gives_no_wrong_token(
    daemon: Start, plant: Plant, undisturbed: Any
) -> None:
    wrong_when(plant, "push.f == 96u")  # the model's size, which no self-test has
    running = daemon(CONFIG)
    with running.client() as client:
        running.ready(client, "gpu")
        with session(client) as where:
            events = answer(where)
        assert tokens(events) == tokens(undisturbed)
        assert text(events) == text(undisturbed)
        assert "while serving" in diagnosis(client, "swiglu.base")
    # It was seen in the first slice: there was nothing to doubt yet.
    assert not [e for e in events if e["type"] in ("suspect", "device")]
    assert "swiglu.base" in events[0]["reason"]


def test_wrong_from_a_position_on_is_named(daemon: Start, plant: Plant, undisturbed: Any) -> None:
    wrong_when(plant, "pvr_pos0() >= 30u")
    running = daemon({**CONFIG, "gpu.check_rate": 1.0})
    with running.client() as client:
        running.ready(client, "gpu")
        with session(client) as where:
            events = answer(where)
        assert "while serving" in diagnosis(client, "swiglu.base")
    (at,) = [i for i, e in enumerate(events) if e["type"] == "suspect"]
    (moved,) = [e for e in events if e["type"] == "device"]
    assert events.index(moved) > at
    assert (moved["device"], events[at]["kernel"]) == ("cpu", "swiglu.base")
    assert "swiglu.base" in moved["reason"]
    before, after = tokens(events[:at]), tokens(events)
    first_wrong = 30 - events[0]["prompt_tokens"]
    assert 0 <= events[at]["since"] <= first_wrong + 1
    assert before[: events[at]["since"]] == tokens(undisturbed)[: events[at]["since"]]
    assert len(before) <= first_wrong + 20
    assert (events[-1]["type"], events[-1]["device"]) == ("end", "cpu")
    # Of wrong tokens one may lead to the model's own end before the last one asked for.
    ended = after[-1] == EOS and events[-1]["reason"] == "stop"
    assert ended or len(after) == TOKENS


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("compile_hang", "the driver's compiler did not return"),
        ("compile_abort", "the driver's compiler ended the worker: it was killed by signal 6"),
    ],
)
def test_a_compiler_that_does_not_come_back(
    daemon: Start, undisturbed: Any, fault: str, reason: str
) -> None:
    running = daemon(
        {
            **CONFIG,
            "deadlines.pipeline_s": 6.0,
            "deadlines.ping_s": 0.2,
            "debug.faults": [f"gpu:{fault}:swiglu.base"],
        }
    )
    with running.client() as client:
        running.ready(client, "gpu")
        with session(client) as where:
            events = answer(where)
        assert tokens(events) == tokens(undisturbed)
        assert events[-1]["device"] == "cpu"
        # The successor would fall, too, if it tried.
        running.ready(client, "gpu", generation=2)
        assert quarantined(running, client) == {"swiglu.base": reason}
        assert reason in diagnosis(client, "swiglu.base")
        assert doctor(running, "kernels") == {
            "what": "Quarantined on this device: swiglu.base.",
            "why": f"swiglu.base: {reason}. Other kernels, or the CPU, do their work.",
        }
        with session(client) as where:
            again = answer(where)
        assert tokens(again) == tokens(undisturbed)
        with session(client, "gpu") as where, pytest.raises(DeviceLost, match=r"swiglu\.base"):
            answer(where)
        assert running.device(client, "gpu")["generation"] == 2
        # Pictures and video need other kernels: the GPU goes on with them.
        assert {d.device for d in play(client, enlarged())} == {"gpu"}


def test_pvrd_remembers_what_the_worker_cannot_write_down(
    daemon: Start, tmp_path: Path, undisturbed: Any
) -> None:
    (tmp_path / "cache").touch()  # where its folder would be
    hangs = {"deadlines.pipeline_s": 6.0, "debug.faults": ["gpu:compile_hang:swiglu.base"]}
    running = daemon({**CONFIG, "deadlines.ping_s": 0.2, **hangs})
    with running.client() as client:
        running.ready(client, "gpu")
        with session(client) as where:
            assert tokens(answer(where)) == tokens(undisturbed)
        running.ready(client, "gpu", generation=2)
        reason = "it ended the worker: it did not answer for 6 s"
        assert quarantined(running, client) == {"swiglu.base": reason}


def test_no_wrong_frame_is_given_out(daemon: Start, plant: Plant) -> None:
    old = "y[out4 + o * xs4] = "
    plant("conv3x3", old, old + "(push.rows > 3u ? 0.5 : 0.0) + ")  # more than the self-test's
    running = daemon(CONFIG)
    with running.client() as client:
        running.ready(client, "gpu")
        assert {d.device for d in play(client, enlarged())} == {"cpu"}
        for name in (found := quarantined(running, client)):
            assert "while serving" in diagnosis(client, name)
        assert {"conv3x3.oc4", "conv3x3.oc8"} >= set(found) > set()
        assert running.device(client, "gpu")["generation"] == 1


def test_pictures_go_to_the_cpu(daemon: Start, plant: Plant) -> None:
    old = "y[out4 + o * xs4] = "
    plant("conv3x3", old, old + "(push.rows > 3u ? 0.5 : 0.0) + ")
    running = daemon(CONFIG)
    with running.client() as client:
        running.ready(client, "gpu")
        results = []
        for device in ("cpu", "auto"):
            source = os.memfd_create("picture", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.write(source, picture())
            fcntl.fcntl(source, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            progress, result = client.upscale(source, {"device": device})
            assert list(progress)[-1]["device"] == "cpu"
            os.close(source)
            with os.fdopen(result, "rb") as file:
                results.append(file.read())
        assert quarantined(running, client)
    assert results[0] == results[1]
