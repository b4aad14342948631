# SPDX-License-Identifier: Apache-2.0
"""What is heard of the GPU itself and of logind, with a real supervisor and fake workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pvrd import config, governor, steering
from pvrd.config import Config
from pvrd.errors import DeviceLost
from pvrd.governor import Governor
from pvrd.holds import Holds
from pvrd.models import Model
from pvrd.sensors import DeviceEvent, Sensors
from pvrd.steering import Steering
from pvrd.supervisor import Supervisor
from pvrd.suspend import Suspend
from pvrd.worker import Worker

LONG = 30.0
CARD, PARENT = "/dev/dri/card0", "0000:01:00.0"


class Stage:
    """Supervisor, governor and steering without a bus."""

    def __init__(self, settings: Config, folder: Path) -> None:
        self.supervisor = Supervisor(settings, str(folder), self._changed)
        self.sensors = Sensors(cast(Any, None), settings, self._heard)
        self.holds = Holds()
        core = SimpleNamespace(
            supervisor=self.supervisor, sensors=self.sensors, governor=Governor(settings),
            holds=self.holds, sessions={},
        )  # fmt: skip
        self.steering = Steering(cast(Any, core), lambda: False, lambda: ())
        self.holds.on_change = self.steering.decide

    def _changed(self) -> None:
        self.steering.met()

    def _heard(self) -> None:
        self.steering.news()

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(LONG):
            while not true():
                await self.supervisor.news()

    def tell(self, action: str, node: str = CARD, *recovery: str) -> None:
        assert self.sensors.on_device is not None
        self.sensors.on_device(DeviceEvent(action, node, PARENT, "powervr", recovery))


Act = Callable[[Stage], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path, fake: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a coroutine function on a Stage whose workers are ready."""
    monkeypatch.setattr(governor, "WEDGED_S", (0.0, 0.05))
    monkeypatch.setattr(governor, "HOLD_S", (0.0, 0.05))

    def run(act: Act, *arguments: str) -> None:
        async def whole() -> None:
            values = {key: rule.default for key, rule in config.KEYS.items()}
            values |= {"workers.program": (*fake, *arguments), "sensors.system": False}
            stage = Stage(Config(values), tmp_path)
            stage.supervisor.start()
            await stage.steering.start()
            try:
                await stage.supervisor.settled(LONG)
                await act(stage)
            finally:
                await stage.steering.stop()
                stage.holds.close()
                await stage.supervisor.stop()

        asyncio.run(whole())

    return run


def test_a_wedged_gpu_is_left_at_once_and_tried_when_it_is_added(play: Any) -> None:
    async def act(stage: Stage) -> None:
        supervisor = stage.supervisor
        stage.tell("wedged", CARD, "rebind", "bus-reset")
        assert supervisor.gpu.state == "asleep"
        assert supervisor.state == "cpu"
        assert "to mend it: rebind, bus-reset" in supervisor.reason
        assert supervisor.decision.device == "cpu"
        assert await supervisor.gpu.gone(LONG)
        assert (await supervisor.choose("auto")).kind == "cpu"
        stage.steering.decide()
        assert supervisor.gpu.state == "asleep"
        stage.tell("add")
        await stage.until(lambda: supervisor.state == "gpu")
        assert supervisor.reason == ""

    play(act)


def test_a_reset_that_the_driver_did_by_itself_is_waited_for(play: Any) -> None:
    async def act(stage: Stage) -> None:
        pid = stage.supervisor.gpu.pid
        stage.tell("wedged")
        assert stage.supervisor.state == "cpu"
        assert "hung" in stage.supervisor.reason
        await stage.until(lambda: stage.supervisor.state == "gpu")
        assert stage.supervisor.gpu.pid != pid

    play(act)


def test_a_removed_gpu_is_named_until_it_is_back(play: Any) -> None:
    async def act(stage: Stage) -> None:
        stage.tell("remove")
        assert stage.supervisor.state == "cpu"
        assert stage.supervisor.reason == f"{CARD} was removed"
        stage.tell("add")
        await stage.until(lambda: stage.supervisor.state == "gpu")

    play(act)


def test_a_kernel_is_blamed_for_a_gpu_that_hung_and_for_no_other_end(play: Any) -> None:
    async def act(stage: Stage) -> None:
        gpu = stage.supervisor.gpu

        async def previous() -> dict[str, Any]:
            await stage.until(lambda: gpu.state == "ready")
            found: dict[str, Any] = gpu._hello()["config"]["previous"]
            return found

        gpu._past.trying = "conv.base"
        hold = stage.holds.add("a game", 1000, ":1.1")
        await stage.until(lambda: gpu.state == "asleep")
        os.close(hold)
        assert await previous() == {"spared": True, "ended_by": {}}
        gpu._past.trying = "conv.base"
        stage.tell("remove")
        stage.tell("add")
        assert await previous() == {"spared": True, "ended_by": {}}
        gpu._past.trying = "conv.base"
        stage.tell("wedged")
        found = await previous()
        assert "hung" in found["how"]
        assert "hung" in found["ended_by"]["conv.base"]

    play(act)


def test_the_canary_of_a_gpu_in_software_counts_for_nothing(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []
    known = Governor.decide

    def decide(self: Governor, snapshot: governor.Snapshot) -> governor.Decision:
        seen.append(snapshot.canary)
        return known(self, snapshot)

    monkeypatch.setattr(Governor, "decide", decide)

    async def act(stage: Stage) -> None:
        gpu = stage.supervisor.gpu
        for software, counts in ((True, None), (False, 99.0)):
            assert gpu.device is not None
            gpu.device["software"] = software
            gpu._on_canary({"t": "canary", "ratio": 99.0, "busy": 1.0, "slices": 5})
            stage.steering.decide()
            assert seen[-1] == counts

    play(act)


def test_another_gpu_is_none_of_ours(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "open_nodes", lambda pid: {"/dev/dri/renderD128"})
    monkeypatch.setattr(steering, "_parent", lambda node: "fd000000.gpu")

    async def act(stage: Stage) -> None:
        stage.tell("wedged", CARD, "rebind")
        stage.tell("remove", "/dev/dri/renderD129")
        assert stage.supervisor.state == "gpu"
        stage.tell("remove", "/dev/dri/renderD128")
        assert stage.supervisor.state == "cpu"

    play(act)


def test_a_gpu_that_comes_later_is_looked_for(play: Any) -> None:
    async def act(stage: Stage) -> None:
        gpu = stage.supervisor.gpu
        assert gpu.state == "absent"
        generation = gpu.generation
        stage.tell("add")
        await stage.until(lambda: gpu.generation > generation and gpu.state == "absent")

    play(act, "--absent", "no_render_node")


def test_jobs_under_a_wedged_gpu_go_on_elsewhere(play: Any) -> None:
    async def act(stage: Stage) -> None:
        supervisor = stage.supervisor
        file = Path(supervisor.gpu.cache) / "m.gguf"
        file.write_bytes(b"GGUF and no more")
        model = Model("m", "text", file, 16, "file", "k")
        seen: list[str] = []
        begun = asyncio.Event()

        async def body(worker: Worker) -> str:
            seen.append(worker.kind)
            with worker.route("job", "j1") as inbox:
                begun.set()
                if worker.kind == "gpu":
                    await inbox.get()
            return worker.kind

        moved: list[str] = []
        job = asyncio.ensure_future(supervisor.attempt("auto", model, 5, body, moved.append))
        await begun.wait()
        stage.tell("wedged", CARD, "rebind")
        assert await job == "cpu"
        assert seen == ["gpu", "cpu"]
        assert "hung" in moved[0]

    play(act)


def test_a_gpu_that_is_held_is_not_waited_for_by_name_for_ever(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pvrd.supervisor.CHOOSE_S", 0.1)

    async def act(stage: Stage) -> None:
        end = stage.holds.add("a game", 1000, ":1.1")
        await stage.until(lambda: stage.supervisor.gpu.state == "asleep")
        with pytest.raises(DeviceLost, match="the GPU is held: a game"):
            await stage.supervisor.choose("gpu")
        os.close(end)
        await stage.until(lambda: stage.supervisor.gpu.state == "ready")
        assert (await stage.supervisor.choose("gpu")).kind == "gpu"

    play(act)


class Login:
    """logind's part, by hand."""

    def __init__(self) -> None:
        self.on_sleep: Callable[[bool], None] | None = None
        self.sleeping = self.inhibiting = False
        self.allows = True
        self.asked = 0

    async def inhibit(self) -> bool:
        self.asked += 1
        self.inhibiting = self.allows
        return self.allows

    def release(self) -> None:
        self.inhibiting = False

    def sleep(self, on: bool) -> None:
        self.sleeping = on
        assert self.on_sleep is not None
        self.on_sleep(on)


def test_the_lock_is_let_go_only_when_the_memory_is_free() -> None:
    async def act() -> None:
        login, free = Login(), asyncio.Event()
        decided = 0

        def decide() -> None:
            nonlocal decided
            decided += 1

        async def released(seconds: float) -> bool:
            await free.wait()
            return True

        suspend = Suspend(login, decide, released)
        suspend.keep_lock()
        await asyncio.sleep(0)
        assert login.inhibiting
        login.sleep(True)
        assert decided == 1
        suspend.keep_lock()
        await asyncio.sleep(0)
        assert login.inhibiting, "it waits for the worker"
        free.set()
        while login.inhibiting:
            await asyncio.sleep(0)
        suspend.keep_lock()
        await asyncio.sleep(0)
        assert login.asked == 1, "not while the system goes to sleep"
        login.sleep(False)
        while not login.inhibiting:
            await asyncio.sleep(0)
        assert decided == 2
        suspend.stop()

    asyncio.run(act())


def test_a_lock_that_is_refused_is_not_asked_for_at_every_news() -> None:
    async def act() -> None:
        login = Login()
        login.allows = False

        async def released(seconds: float) -> bool:
            return True

        suspend = Suspend(login, lambda: None, released)
        for _ in range(50):
            suspend.keep_lock()
            await asyncio.sleep(0)
        assert login.asked == 1

    asyncio.run(act())


def test_a_worker_that_ends_while_pvrd_does_is_not_followed(play: Any) -> None:
    """asyncio.wait_for loses a cancel() that comes together with what it waited for."""

    async def act(stage: Stage) -> None:
        gpu = stage.supervisor.gpu
        gpu.rest("it has nothing to do")
        process = gpu._process
        assert process is not None
        process.ended.add_done_callback(lambda _: stop.append(asyncio.ensure_future(gpu.stop())))
        stop: list[asyncio.Future[None]] = []
        await stage.until(lambda: gpu.state == "asleep")
        assert await gpu.gone(LONG)
        await asyncio.sleep(0)
        done, _ = await asyncio.wait(stop, timeout=LONG)
        assert done

    play(act)
