# SPDX-License-Identifier: Apache-2.0
"""The Vulkan backend: a GPU with its pipelines, its memory and its queue.

Each submission is waited for, with a deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import kernels
from engine.backends import profiles, selftest, speed
from engine.backends.base import COUNTERS, NOTHING, Array, Lent
from engine.backends.devices import MemoryType, Verdict, judge, plan_memory, why_none
from engine.backends.gate import misfit
from engine.backends.vulkan import api
from engine.backends.vulkan.ferry import Adoption
from engine.backends.vulkan.recording import Pipeline, VulkanExecutable, VulkanWeights
from engine.errors import DeviceLost, InvalidArgument, OutOfMemory, PvrError
from engine.program import Program

_STAGING = 16 << 20
Report = Callable[[str, str, str], None]
T = TypeVar("T")


def list_devices(allow_software: bool = False, want: str = "") -> list[Verdict]:
    """All devices that the loader knows, each with the reason why it is not taken.

    Raises:
        NoDevice: there is none to list; its code says why.
    """
    instance = api.Instance()
    try:
        verdicts = judge([c for _, c in instance.devices()], allow_software, want)
    finally:
        instance.close()
    if not verdicts:
        raise why_none([])
    return verdicts


class VulkanBackend:
    """A GPU, opened.

    `allow_software` admits devices of type CPU, `want` names one device (uuid or part of the name),
    `deadline_s` bounds a submission (0: 10 s, 120 s on a software device). `lose_at` makes the n-th
    submission since opening, and all after it, report device loss (0: none); it may be set at any
    time. Self-tests of kernels are kept in the folder `verdicts`, if given, and tell from the start
    which are `quarantined` (a property of info, names with spaces between). `force_staging` treats
    the device as one whose memory the host cannot see. `profile` lowers limits and features to
    those of another device (engine.backends.profiles; None: as $PVRD_PROFILE says, "" as they are).
    `previous` is how the process that had the device before ended. Variants are timed at an
    operation's first use (engine.backends.speed) if `measure` says so (None: not on a software
    device, where the baseline is as good as any); `times` in info's properties says what was found.

    Raises:
        NoDevice: none is usable; the code says why.
        InvalidArgument: there is no such profile.
    """

    def __init__(
        self,
        allow_software: bool = False,
        want: str = "",
        deadline_s: float = 0.0,
        lose_at: int = 0,
        verdicts: Path | None = None,
        force_staging: bool = False,
        profile: str | None = None,
        previous: selftest.Previous | None = None,
        measure: bool | None = None,
    ) -> None:
        lowered = profiles.wanted(profile)
        self.lose_at = lose_at
        self._report: Report = lambda what, name, reason: None
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._pipelines: dict[tuple[str, str], Pipeline] = {}
        self._layouts: dict[tuple[int, int], api.Layout] = {}
        self._live: set[VulkanExecutable | VulkanWeights] = set()
        self._adopted: list[Adoption] = []
        # What is quarantined, as of so many changes of what is known.
        self._barred: tuple[int, dict[str, str]] | None = None
        self._lost = ""
        self._pending = self._hung = self._testing = False
        self._lock = threading.RLock()  # a queue belongs to one thread at a time
        with ExitStack() as stack:
            instance = api.Instance()
            stack.callback(instance.close)
            found = instance.devices()
            judged = judge([c for _, c in found], allow_software, want)
            chosen = next((v.candidate for v in judged if v.chosen), None)
            if chosen is None:
                raise why_none(judged)
            self._verdicts = selftest.Verdicts(chosen.info, verdicts, previous)
            self._speeds = speed.Speeds(chosen.info, verdicts)
            self._measure = not chosen.info.software if measure is None else measure
            known = " ".join(self.quarantined())
            properties = {**chosen.info.properties, "quarantined": known}
            properties["times"] = self._speeds.told()
            info = replace(chosen.info, properties=properties)
            self.info = lowered.lower(info) if lowered else info
            self.deadline_s = deadline_s or (120.0 if self.info.software else 10.0)
            physical = found[chosen.index][0]
            self._plan = plan_memory(api.memory_types(physical), force_staging)
            self._device = api.Device(instance.handle, physical, self.info)
            told: Any = self.info.properties
            told["queue_priority"] = "low" if self._device.low else "default"
            stack.callback(self._device.stack.close)
            self._staging: api.Placed | None = None
            self._staging_stack = stack.enter_context(ExitStack())
            self._stack = stack.pop_all()

    # --- what users of a backend call

    def weights(self, blobs: Mapping[str, Array]) -> VulkanWeights:
        return VulkanWeights(self, blobs)

    def executable(self, program: Program, weights: Any, lent: Lent = NOTHING) -> VulkanExecutable:
        return VulkanExecutable(self, program, weights, lent)

    def adopt(self, memory: Array, fd: int = -1) -> Adoption | None:
        if not self._plan.apart and self._plan.readback.cached:
            return None  # the host's own copy to and from such memory is as good
        with suppress(PvrError, OSError), self._lock:
            return Adoption(self, memory, fd)
        return None

    def adopted(self, memory: Array) -> tuple[Adoption, int] | None:
        """The adopted memory that holds an array, and where; None: it lies elsewhere, or not in one
        piece.
        """
        if not self._adopted or not memory.flags.c_contiguous:
            return None
        begin = memory.__array_interface__["data"][0]  # ctypes.data takes microseconds
        for one in self._adopted:
            if one.begin <= begin and begin + memory.nbytes <= one.end:
                return one, begin - one.begin
        return None

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def close(self) -> None:
        """Frees all, executables and weights that are still open too."""
        for thing in [*self._live, *self._adopted]:
            thing.close()
        self._pipelines, self._layouts, self._staging = {}, {}, None
        self._release(self._stack)

    # --- pipelines

    def misfit(self, op: str, variant: str) -> str:
        """Why the device cannot have this variant; "" when it can."""
        try:
            entry = kernels.manifest().get(op, {}).get(variant)
        except (OSError, ValueError) as e:
            raise PvrError(f"the kernels cannot be loaded: {e}") from e
        if entry is None:
            return "it was not compiled"
        return misfit(entry, self.info.limits, self.info.features)

    def pipeline(self, op: str, variant: str) -> Pipeline:
        """The pipeline of a variant, made at its first use.

        Raises:
            InvalidArgument: there is no such variant, or the device must not get it.
            Quarantined: the device computes it wrongly.
        """
        made = self._pipelines.get((op, variant))
        if made is not None:
            return made
        if why := self.misfit(op, variant):
            raise InvalidArgument(f"{op}.{variant} is not for {self.info.name}: {why}")
        name, sha = f"{op}.{variant}", kernels.manifest()[op][variant]["sha256"]
        wrong = self._verdicts.get(sha)  # None: it was not tried yet
        if not wrong:
            wrong = self._make(op, variant, untried=wrong is None)
            self._verdicts.put(sha, name, wrong)
            self._report("tried", name, wrong)
        if wrong:
            self._pipelines.pop((op, variant), None)
            self._report("quarantined", name, wrong)
            raise selftest.Quarantined(self.doubt(op, variant))
        return self._pipelines[op, variant]

    def _make(self, op: str, variant: str, untried: bool) -> str:
        """Makes a pipeline, and tries it where that was not done before; what is wrong with it."""
        entry, contract = kernels.manifest()[op][variant], kernels.op(op)
        form = contract.variant(variant)
        shape = (contract.storage_count(form), contract.push_bytes(form))
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = self._device.layout(*shape)
        try:
            code = (kernels.artifacts() / entry["file"]).read_bytes()
        except OSError as e:
            raise PvrError(f"the kernels cannot be loaded: {e}") from e
        name, sha = f"{op}.{variant}", entry["sha256"]
        try:
            # Also one that passed once: it is compiled anew, and the driver's cache may be gone.
            self._verdicts.begin(sha, name, "compile")
            self._report("trying", name, "")
            handle = self._device.pipeline(name, code, layout)
            self._pipelines[op, variant] = Pipeline(handle, layout, contract, form)
            if not untried:
                return ""
            self._verdicts.begin(sha, name, "run")
            return self._try(op, variant)
        except (InvalidArgument, OutOfMemory):  # these say nothing of the kernel
            self._verdicts.restore(sha)
            raise
        except DeviceLost:
            raise  # whoever opens the device next knows what lost it
        except PvrError as e:  # the driver's compiler gave up
            return str(e)

    def quarantine(self, op: str, variant: str, wrong: str) -> None:
        """Uses a variant no more that a check of running work found wrong; what is recorded with it
        has to be closed by its owner.
        """
        name, sha = f"{op}.{variant}", kernels.manifest()[op][variant]["sha256"]
        self._pipelines.pop((op, variant), None)
        self._verdicts.put(sha, name, wrong, serving=True)
        self._report("quarantined", name, wrong)

    def doubt(self, op: str, variant: str) -> str:
        """Why a variant is not to be trusted, a sentence without its stop; "" if it is."""
        entry = kernels.manifest().get(op, {}).get(variant)
        wrong = self._verdicts.get(entry["sha256"]) if entry else None
        name = f"{op}.{variant}"
        if not wrong:
            return ""
        return f"{self.info.name} cannot be trusted with {name} ({wrong}), so it is not used"

    def quarantined(self) -> dict[str, str]:
        """All variants of the kernels that there are now that are quarantined, with the reasons.
        Asked before each slice, so it is looked up anew only when something has changed.
        """
        if self._barred is None or self._barred[0] != self._verdicts.changes:
            try:
                manifest = kernels.manifest()
            except (OSError, ValueError):
                return {}
            found = {
                f"{op}.{variant}": self._verdicts.get(entry["sha256"])
                for op, variants in sorted(manifest.items())
                for variant, entry in sorted(variants.items())
            }
            aside = {name: wrong for name, wrong in found.items() if wrong}
            self._barred = self._verdicts.changes, aside
        return self._barred[1]

    def fastest(self, op: str, variants: Sequence[str], push: Mapping[str, Any]) -> str:
        """The fastest of these variants, which `misfit` and `doubt` let through, for a call with
        these push constants; the first is taken unless another is measured to be better. One that
        is wrong is quarantined on the way.

        Raises:
            DeviceLost
        """
        what = speed.trial(op, push, self.info.limits.max_storage_range)
        if not self._measure or what is None or len(variants) < 2:
            return variants[0]
        entries = kernels.manifest()[op]
        shas = {v: str(entries[v]["sha256"]) for v in variants}
        chosen = self._speeds.fastest(self._race, shas, what)
        told: Any = self.info.properties
        told["times"] = self._speeds.told()
        return chosen

    def _race(self, variants: Sequence[str], what: speed.Trial) -> speed.Times:
        """Seconds a call of those variants that the device can have after all."""
        usable = []
        for variant in variants:
            with suppress(selftest.Quarantined, InvalidArgument, OutOfMemory):
                self.pipeline(what.op, variant)
                usable.append(variant)
        with suppress(InvalidArgument, OutOfMemory):
            return self._aside(lambda: speed.race(self, usable, what))
        return {}

    def _aside(self, work: Callable[[], T]) -> T:
        """Runs what no user of the device asked for: counters stay as they are."""
        counters = dict(self._counters)
        self._testing = True
        try:
            return work()
        finally:
            self._testing = False
            self._counters.update(counters)

    def listen(self, report: Report) -> None:
        """`report` is called with `trying`, a kernel's name and "" before the driver's compiler
        gets it, with `tried` and what is wrong with it ("": nothing) after its self-test, and with
        `quarantined` and the reason when it is.
        """
        self._report = report

    def _try(self, op: str, variant: str) -> str:
        """Self-test of a variant; what is wrong with it."""
        name, sha = f"{op}.{variant}", kernels.manifest()[op][variant]["sha256"]
        repeats = selftest.REPEATS if self._verdicts.doubted(sha) else 1
        try:
            return self._aside(lambda: selftest.run(self, [name], repeats).get(name, ""))
        except BaseException:
            del self._pipelines[op, variant]
            raise

    # --- memory

    def _place(self, stack: ExitStack, sizes: Mapping[str, int], use: str) -> dict[str, api.Placed]:
        """Buffers in memory of a use: those of MemoryPlan, or `apart`, which is not mapped."""
        kind: MemoryType = getattr(self._plan, "device" if use == "apart" else use)
        mapped = use != "apart" and (use != "device" or self._plan.unified)
        return self._device.memory.place(stack, sizes, kind, mapped)

    def _stage(self) -> tuple[api.Placed, Array]:
        if self._staging is None:
            # The host reads it, too: never memory beyond a bus, as that for uploads may be.
            self._staging = self._place(self._staging_stack, {"": _STAGING}, "readback")[""]
        assert self._staging.mapped is not None
        return self._staging, self._staging.mapped

    def _upload(self, target: api.Placed, data: Array, offset: int) -> None:
        self._counters["bytes_uploaded"] += data.nbytes
        if target.mapped is not None:
            target.mapped[offset : offset + data.nbytes] = data
            return
        with self._lock:
            stage, memory = self._stage()
            for at in range(0, data.nbytes, _STAGING):
                part = data[at : at + _STAGING]
                memory[: part.nbytes] = part
                self._submit(
                    self._device.copying(stage, 0, target, offset + at, part.nbytes), False
                )

    def _download(self, source: api.Placed, nbytes: int, offset: int) -> Array:
        self._counters["bytes_read_back"] += nbytes
        if source.mapped is not None:
            return source.mapped[offset : offset + nbytes].copy()
        out = np.empty(nbytes, np.uint8)
        with self._lock:
            stage, memory = self._stage()
            for at in range(0, nbytes, _STAGING):
                size = min(_STAGING, nbytes - at)
                self._submit(self._device.copying(source, offset + at, stage, 0, size), False)
                out[at : at + size] = memory[:size]
        return out

    def _zero(self, target: api.Placed) -> None:
        if target.mapped is not None:
            target.mapped[:] = 0
            return
        with self._lock:
            self._submit(self._device.zeroing(target), False)

    # --- submissions

    def _submit(self, submission: Any, count: bool = True) -> None:
        """One submission, waited for. Transfers are not counted: they are no slices.

        Raises:
            DeviceLost: now or before; nothing more is submitted after it.
        """
        with self._lock:
            if self._lost:
                raise DeviceLost(self._lost)
            count = count and not self._testing
            self._counters["submissions"] += count
            if count and 0 < self.lose_at <= self._counters["submissions"]:
                self._lost = "the GPU was told to report loss"
                raise DeviceLost(self._lost)
            try:
                self._device.submit(submission)
            except DeviceLost as e:
                self._lost = str(e)
                raise
            self._pending = True
            try:
                self._device.wait(self.deadline_s)
            except TimeoutError as e:
                self._lost = f"the GPU did not finish within {self.deadline_s:g} s"
                raise DeviceLost(self._lost) from e
            except PvrError as e:  # whatever it is: nobody knows whether the slice was done
                self._lost = str(e)
                raise DeviceLost(self._lost) from e
            self._pending = False

    def _release(self, stack: ExitStack) -> None:
        """Destroys handles, unless a hung submission may still use them: then the end of the
        process has to.
        """
        with self._lock:
            if self._pending:
                if self._hung:
                    stack.pop_all()
                    return
                try:
                    self._device.wait(min(self.deadline_s + 1.0, 5.0))
                    self._pending = False
                except TimeoutError:
                    self._hung = True  # wait for it once alone
                    stack.pop_all()
                    return
                except PvrError:
                    self._pending = False  # lost: nothing runs any more
            stack.close()
