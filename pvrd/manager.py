# SPDX-License-Identifier: Apache-2.0
"""org.pvrd.Pvrd1.Manager: opens sessions, keeps models, tells what there is."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

from pvrd import (
    __version__,
    adding,
    config,
    diagnostics,
    fds,
    governor,
    holds,
    jobs,
    options,
    polkit,
    stats,
    trace,
)
from pvrd.bus import Call, Variant
from pvrd.bus_values import V, plain, variant
from pvrd.core import Core
from pvrd.enlarge import check_sides, family, out_size, smaller
from pvrd.errors import (
    Busy,
    InvalidArgument,
    PvrdError,
    QuotaExceeded,
)
from pvrd.models import Model, check_name, describe
from pvrd.objects import ROOT, Answer, Object, method, prop
from pvrd.pictures import PictureJob
from pvrd.reports import Activity, Reports
from pvrd.text_session import TextSession
from pvrd.video_layout import plan
from pvrd.video_session import VideoSession
from pvrd.workers import protocol

FREE_PRIORITY = 11
VIDEO_FDS = 3  # of a session: the ring's, and both ends of the socket until one is handed over
SENSORS_S = 2.0  # for reading them; then their last values do
_TYPES = {"size": "t", "added": "t", "removable": "b", "default": "b"}
_KINDS = {"bool": "b", "int": "t", "float": "d", "str": "s", "strs": "as"}


class Manager(Object):
    """The one object that everybody sees."""

    INTERFACE = "org.pvrd.Pvrd1.Manager"

    def __init__(self, core: Core, bus: str, configured: Callable[[], None]) -> None:
        """`configured` reads the configuration anew after SetConfig stored something."""
        super().__init__(ROOT)
        self._core = core
        self._bus = bus
        self._configured = configured
        self._told: dict[str, Any] = {}
        self.activity = Activity(self._works, lambda: core.supervisor.places.running() > 0)
        for worker in core.supervisor.workers:
            worker.on_work = self.activity.touch
        self.reports = Reports(
            core.connection, core.peers, core.sensors.compositor, lambda: core.steer()
        )

    def _works(self) -> None:
        self._core.tree.changed(self, "Working")
        self._core.steer()

    def news(self) -> None:
        """A worker changed: what shows in the properties is told to all."""
        values = self.values(("State", "Reason", "Devices", "Decision"))
        now = {name: plain(value) for name, value in values.items()}
        names = [name for name, value in now.items() if self._told.get(name) != value]
        self._told = now
        if names:
            self._core.tree.changed(self, *names)

    # -- properties

    @prop("Version", "s")
    def version(self) -> str:
        """Of pvrd."""
        return __version__

    @prop("Protocols", "a{su}")
    def protocols(self) -> dict[str, int]:
        """Versions of the fd protocols."""
        return {"text-stream": 1, "slot-socket": 1}

    @prop("State", "s")
    def state(self) -> str:
        """gpu, cpu, starting, failed."""
        return self._core.supervisor.state

    @prop("Reason", "s")
    def reason(self) -> str:
        """Why not gpu."""
        return self._core.supervisor.reason

    @prop("Devices", "aa{sv}")
    def devices(self) -> list[dict[str, Variant]]:
        """One entry a worker."""
        return diagnostics.devices(self._core.supervisor.workers)

    @prop("Decision", "a{sv}")
    def decision(self) -> dict[str, Variant]:
        """What the governor lets work take, and why."""
        known = governor.describe(self._core.supervisor.decision)
        return {key: variant(value) for key, value in known.items()}

    @prop("Working", "b")
    def working(self) -> bool:
        """Is work under way? Agents measure only then."""
        return self.activity.working

    # -- sessions

    async def _allow_priority(self, call: Call, priority: int) -> None:
        if priority > FREE_PRIORITY:
            uid = await self._core.peers.uid(call.sender)
            await self._core.polkit.check(call.sender, uid, polkit.PRIORITY, call.interactive)

    def _check_share(self, share: int) -> None:
        taken = self._core.shares()
        if share and taken + share > 100:
            raise Busy(f"{taken} % of the device are promised already, {share} % more do not fit")

    @method("OpenText", "options:a{sv}", "session:o")
    async def open_text(self, call: Call, given: dict[str, Any]) -> str:
        """Opens a session; loading shows in its properties."""
        core = self._core
        core.check_open()
        chosen = options.parse(given, options.TEXT_SESSION)
        model = await core.store.ask(lambda: core.store.find(chosen["model"], "text"))
        core.supervisor.check_device(chosen["device"])
        await self._allow_priority(call, chosen["priority"])
        uid = await core.peers.hold(call.sender)
        try:
            self._check_share(chosen["share"])
            core.peers.take(uid, sessions=1)
        except PvrdError:
            core.peers.release(call.sender)
            raise
        session = TextSession(core, call.sender, uid, model, chosen)
        session.open()
        return session.path

    @method("OpenVideo", "options:a{sv}", "session:o ring:h socket:h layout:a{sv}")
    async def open_video(self, call: Call, given: dict[str, Any]) -> Answer:
        """Opens a session with its ring and socket."""
        core = self._core
        core.check_open()
        chosen = options.parse(given, options.VIDEO_SESSION)
        if chosen["width"] is None or chosen["height"] is None:
            raise InvalidArgument("the options width and height are needed")
        if chosen["depth"] not in (8, 16):
            raise InvalidArgument(f"option 'depth' is 8 or 16, not {chosen['depth']}")
        sides = ("width", "height")
        ratio = max(o / chosen[s] for s, o in zip(sides, out_size(chosen), strict=True))

        def enlargers() -> tuple[list[Model], list[list[Model]]]:
            models = family(core.store, chosen["model"], ratio)
            return models, smaller(core.store, models[0], ratio)

        models, fewer = await core.store.ask(enlargers)
        core.supervisor.check_device(chosen["device"])
        await self._allow_priority(call, chosen["priority"])
        uid = await core.peers.hold(call.sender)
        try:
            self._check_share(chosen["share"])
            layout = plan(chosen, core.peers.free(uid))
            core.peers.take(uid, 1, layout.ring_bytes, VIDEO_FDS)
            try:
                session = VideoSession(core, call.sender, uid, models, chosen, layout, fewer)
                session.fds = VIDEO_FDS
            except BaseException:
                core.peers.give(uid, 1, layout.ring_bytes, VIDEO_FDS)
                raise
        except BaseException:
            core.peers.release(call.sender)
            raise
        session.open()
        try:
            return session.answer()
        except BaseException:
            session.close()
            raise

    @method("Upscale", "picture:h options:a{sv}", "result:h info:a{sv}")
    async def upscale(self, call: Call, index: int, given: dict[str, Any]) -> Answer:
        """Enlarges one picture."""
        core = self._core
        core.check_open()
        chosen = options.parse(given, options.PICTURE)
        check_sides(chosen)
        ratio = None if chosen["out_width"] else chosen["scale"]
        models = await core.store.ask(lambda: family(core.store, chosen["model"], ratio))
        core.supervisor.check_device(chosen["device"])
        await self._allow_priority(call, chosen["priority"])
        uid = await core.peers.uid(call.sender)
        core.supervisor.places.admit(core.peers.usage(uid).jobs)
        self._check_share(chosen["share"])
        job = PictureJob(core, uid, models, chosen)
        try:
            await job.take(_take(call, index))
            if chosen["stream"]:
                return job.later()
            async with core.peers.present(call.sender):
                answer = await job.now()
        except BaseException:
            job.close()
            raise
        job.close()
        return answer

    # -- models

    @method("ListModels", "", "models:aa{sv}")
    async def list_models(self, call: Call) -> list[dict[str, Variant]]:
        """All models."""
        store = self._core.store
        return [
            {key: V(_TYPES.get(key, "s"), value) for key, value in item.items()}
            for item in await store.ask(lambda: describe(store))
        ]

    @method("AddModel", "file:h name:s options:a{sv}", "info:a{sv}", timeout=None)
    async def add_model(self, call: Call, index: int, name: str, given: dict[str, Any]) -> Answer:
        """Copies a model into the store."""
        core = self._core
        core.check_open()
        check_name(name)
        chosen = options.parse(given, options.ADD_MODEL)
        uid = await core.peers.uid(call.sender)
        asks = call.interactive or chosen["interactive"]
        async with core.peers.present(call.sender):
            with core.peers.fds(uid, len(call.fds)):  # a dialog can take minutes
                await core.polkit.check(call.sender, uid, polkit.MODELS, asks)
            return await adding.add(core, _take(call, index), uid, name, chosen)

    @method("RemoveModel", "name:s", timeout=None)
    async def remove_model(self, call: Call, name: str) -> None:
        """Removes an added model."""
        core = self._core
        uid = await core.peers.uid(call.sender)
        await core.polkit.check(call.sender, uid, polkit.MODELS, call.interactive)
        core.supervisor.drop(await core.store.change(lambda: core.store.remove(name)))

    # -- the rest

    @method("ReportCompositor", "report:a{sv}", "believed:b")
    async def report_compositor(self, call: Call, given: dict[str, Any]) -> bool:
        """What a pvr-agent saw of its session's compositor."""
        believed = await self.reports.report(call, given)
        self._core.steer()
        return believed

    @method("Hold", "reason:s options:a{sv}", "hold:h", timeout=None)
    async def hold(self, call: Call, reason: str, given: dict[str, Any]) -> Answer:
        """Keeps the GPU free while the pipe is open and the caller is on the bus."""
        core = self._core
        core.check_open()
        chosen = options.parse(given, holds.OPTIONS)
        uid = await core.peers.uid(call.sender)
        core.holds.check(reason, uid)
        asks = call.interactive or chosen["interactive"]
        await core.polkit.check(call.sender, uid, polkit.HOLD, asks)
        await core.peers.hold(call.sender)
        try:
            return Answer([0], [core.holds.add(reason, uid, call.sender)])
        except BaseException:
            core.peers.release(call.sender)
            raise

    @method("GetConfig", "", "config:a{sv}")
    async def get_config(self, call: Call) -> dict[str, Variant]:
        """Values in force."""
        values = self._core.config.values
        return {
            key: V(_KINDS[rule.kind], list(values[key]) if rule.kind == "strs" else values[key])
            for key, rule in config.KEYS.items()
        }

    @method("SetConfig", "config:a{sv}", timeout=None)
    async def set_config(self, call: Call, given: dict[str, Any]) -> None:
        """Changes some, at once and for good."""
        core = self._core
        values = config.settable(plain(given))
        for key in ("models.text", "models.video"):
            if values.get(key):  # one that cannot be; it may come later than this
                check_name(values[key])
        uid = await core.peers.uid(call.sender)
        await core.polkit.check(call.sender, uid, polkit.CONFIGURE, call.interactive)
        try:
            config.store(core.paths, values)
        except config.ConfigError as e:
            raise InvalidArgument(str(e)) from None
        except OSError as e:
            raise QuotaExceeded(f"{core.paths.stored} cannot be written: {e.strerror}") from None
        try:
            self._configured()
        except config.ConfigError as e:
            raise InvalidArgument(f"it is stored, but not in force: {e}") from None

    @method("GetStatistics", "", "statistics:a{sv}")
    async def get_statistics(self, call: Call) -> dict[str, Variant]:
        """Counters."""
        core, supervisor = self._core, self._core.supervisor
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(core.sensors.refresh(), SENSORS_S)
        reported = await asyncio.gather(*(worker.stats(1.0) for worker in supervisor.workers))
        out = stats.typed(
            core.stats, len(core.sessions), supervisor.places.running(), supervisor.places.waiting()
        )
        for worker, numbers in zip(supervisor.workers, reported, strict=True):
            out[worker.kind] = stats.worker_typed(worker, numbers)
        out["sensors"] = diagnostics.sensors(core)
        return out

    @method("ListJobs", "options:a{sv}", "jobs:aa{sv}", timeout=None)
    async def list_jobs(self, call: Call, given: dict[str, Any]) -> list[dict[str, Variant]]:
        """The caller's jobs and sessions, or those of all."""
        chosen = options.parse(given, options.LIST_JOBS)
        uid = await self._core.peers.uid(call.sender)
        if not chosen["all"]:
            return jobs.listing(self._core, uid)
        await self._core.polkit.check(call.sender, uid, polkit.INSPECT, call.interactive)
        return jobs.listing(self._core, None)

    @method("Trace", "options:a{sv}", "trace:h", timeout=None)
    async def trace(self, call: Call, given: dict[str, Any]) -> Answer:
        """Slices and jobs of some seconds, as a file for Perfetto."""
        core = self._core
        core.check_open()
        chosen = options.parse(given, options.TRACE)
        uid = await core.peers.uid(call.sender)
        await core.polkit.check(call.sender, uid, polkit.INSPECT, call.interactive)
        async with core.peers.present(call.sender):
            if core.jobs.ended is not None:
                raise Busy("a trace is being made already, position 1 in the queue")
            data = await trace.record(core, chosen["seconds"])
        target = fds.memfd("pvrd-trace")
        try:
            await fds.in_thread(lambda: protocol.write_all(target, data))
            fds.seal(target, fds.SEAL_SHRINK | fds.SEAL_GROW | fds.SEAL_WRITE)
            return Answer([0], [fds.read_only(target)])
        finally:
            os.close(target)

    @method("GetDiagnostics", "", "facts:aa{sv}")
    async def get_diagnostics(self, call: Call) -> list[dict[str, Variant]]:
        """What a doctor reads."""
        seen = diagnostics.agent(*self.reports.words(self.working()))
        return [*await diagnostics.facts(self._core, __version__, self._bus), seen]


def _take(call: Call, index: int) -> int:
    try:
        return call.fds.take(index)
    except IndexError:
        raise InvalidArgument("the message came without its file descriptor") from None
