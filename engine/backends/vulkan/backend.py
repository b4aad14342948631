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

from engine.backends import profiles, selftest, speed
from engine.backends.base import COUNTERS, NOTHING, Array, Lent
from engine.backends.devices import MemoryType, Verdict, judge, plan_memory, why_none
from engine.backends.vulkan import api
from engine.backends.vulkan.ferry import Adoption
from engine.backends.vulkan.pipelines import Pipeline, Pipelines, Report
from engine.backends.vulkan.recording import VulkanExecutable, VulkanWeights
from engine.errors import DeviceLost, PvrError
from engine.program import Program

_STAGING = 16 << 20
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
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._live: set[VulkanExecutable | VulkanWeights] = set()
        self._adopted: list[Adoption] = []
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
            self._kernels = Pipelines(
                self,
                selftest.Verdicts(chosen.info, verdicts, previous),
                speed.Speeds(chosen.info, verdicts),
                not chosen.info.software if measure is None else measure,
            )
            known = " ".join(self.quarantined())
            properties = {**chosen.info.properties, "quarantined": known}
            properties["times"] = self._kernels.times()
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
        self._kernels.forget()
        self._staging = None
        self._release(self._stack)

    # --- kernels, as Pipelines says

    def misfit(self, op: str, variant: str) -> str:
        return self._kernels.misfit(op, variant)

    def pipeline(self, op: str, variant: str) -> Pipeline:
        return self._kernels.pipeline(op, variant)

    def quarantine(self, op: str, variant: str, wrong: str) -> None:
        self._kernels.quarantine(op, variant, wrong)

    def doubt(self, op: str, variant: str) -> str:
        return self._kernels.doubt(op, variant)

    def quarantined(self) -> dict[str, str]:
        return self._kernels.quarantined()

    def fastest(self, op: str, variants: Sequence[str], push: Mapping[str, Any]) -> str:
        return self._kernels.fastest(op, variants, push)

    def listen(self, report: Report) -> None:
        self._kernels.listen(report)

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

    def _aside(self, work: Callable[[], T]) -> T:
        """Runs what no user of the device asked for: counters stay as they are."""
        counters = dict(self._counters)
        self._testing = True
        try:
            return work()
        finally:
            self._testing = False
            self._counters.update(counters)

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
