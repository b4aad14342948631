# SPDX-License-Identifier: Apache-2.0
"""The kernels of an opened device: their pipelines, made at the first use and tried where that was
not done before; which of the variants is the fastest; which are not to be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kernels
from engine.backends import selftest, speed
from engine.backends.gate import misfit
from engine.backends.vulkan import api
from engine.errors import DeviceLost, InvalidArgument, OutOfMemory, PvrError
from kernels.contract import Contract, Variant

if TYPE_CHECKING:
    from engine.backends.vulkan.backend import VulkanBackend

Report = Callable[[str, str, str], None]


@dataclass(frozen=True)
class Pipeline:
    """A variant, compiled."""

    handle: Any
    layout: api.Layout
    contract: Contract
    variant: Variant


class Pipelines:
    """Those of a backend, which hands on what its users ask. Without `measure` no variant is timed,
    and the first is taken.
    """

    def __init__(
        self,
        backend: VulkanBackend,
        verdicts: selftest.Verdicts,
        speeds: speed.Speeds,
        measure: bool,
    ) -> None:
        self._backend, self._verdicts, self._speeds = backend, verdicts, speeds
        self._measure = measure
        self._report: Report = lambda what, name, reason: None
        self._made: dict[tuple[str, str], Pipeline] = {}
        self._layouts: dict[tuple[int, int], api.Layout] = {}
        # What is quarantined, as of so many changes of what is known.
        self._barred: tuple[int, dict[str, str]] | None = None

    def listen(self, report: Report) -> None:
        """`report` is called with `trying`, a kernel's name and "" before the driver's compiler
        gets it, with `tried` and what is wrong with it ("": nothing) after its self-test, and with
        `quarantined` and the reason when it is.
        """
        self._report = report

    def times(self) -> str:
        """What timing found so far, for people."""
        return self._speeds.told()

    def forget(self) -> None:
        """The device is about to be closed, and its pipelines with it."""
        self._made, self._layouts = {}, {}

    def misfit(self, op: str, variant: str) -> str:
        """Why the device cannot have this variant; "" when it can."""
        try:
            entry = kernels.manifest().get(op, {}).get(variant)
        except (OSError, ValueError) as e:
            raise PvrError(f"the kernels cannot be loaded: {e}") from e
        if entry is None:
            return "it was not compiled"
        return misfit(entry, self._backend.info.limits, self._backend.info.features)

    def pipeline(self, op: str, variant: str) -> Pipeline:
        """The pipeline of a variant, made at its first use.

        Raises:
            InvalidArgument: there is no such variant, or the device must not get it.
            Quarantined: the device computes it wrongly.
        """
        made = self._made.get((op, variant))
        if made is not None:
            return made
        if why := self.misfit(op, variant):
            raise InvalidArgument(f"{op}.{variant} is not for {self._backend.info.name}: {why}")
        name, sha = f"{op}.{variant}", kernels.manifest()[op][variant]["sha256"]
        wrong = self._verdicts.get(sha)  # None: it was not tried yet
        if not wrong:
            wrong = self._make(op, variant, untried=wrong is None)
            self._verdicts.put(sha, name, wrong)
            self._report("tried", name, wrong)
        if wrong:
            self._made.pop((op, variant), None)
            self._report("quarantined", name, wrong)
            raise selftest.Quarantined(self.doubt(op, variant))
        return self._made[op, variant]

    def _make(self, op: str, variant: str, untried: bool) -> str:
        """Makes a pipeline, and tries it where that was not done before; what is wrong with it."""
        entry, contract = kernels.manifest()[op][variant], kernels.op(op)
        form = contract.variant(variant)
        shape = (contract.storage_count(form), contract.push_bytes(form))
        layout = self._layouts.get(shape)
        if layout is None:
            layout = self._layouts[shape] = self._backend._device.layout(*shape)
        try:
            code = (kernels.artifacts() / entry["file"]).read_bytes()
        except OSError as e:
            raise PvrError(f"the kernels cannot be loaded: {e}") from e
        name, sha = f"{op}.{variant}", entry["sha256"]
        try:
            # Also one that passed once: it is compiled anew, and the driver's cache may be gone.
            self._verdicts.begin(sha, name, "compile")
            self._report("trying", name, "")
            handle = self._backend._device.pipeline(name, code, layout)
            self._made[op, variant] = Pipeline(handle, layout, contract, form)
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
        self._made.pop((op, variant), None)
        self._verdicts.put(sha, name, wrong, serving=True)
        self._report("quarantined", name, wrong)

    def doubt(self, op: str, variant: str) -> str:
        """Why a variant is not to be trusted, a sentence without its stop; "" if it is."""
        entry = kernels.manifest().get(op, {}).get(variant)
        wrong = self._verdicts.get(entry["sha256"]) if entry else None
        device, name = self._backend.info.name, f"{op}.{variant}"
        if not wrong:
            return ""
        return f"{device} cannot be trusted with {name} ({wrong}), so it is not used"

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
        what = speed.trial(op, push, self._backend.info.limits.max_storage_range)
        if not self._measure or what is None or len(variants) < 2:
            return variants[0]
        entries = kernels.manifest()[op]
        shas = {v: str(entries[v]["sha256"]) for v in variants}
        chosen = self._speeds.fastest(self._race, shas, what)
        told: Any = self._backend.info.properties
        told["times"] = self.times()
        return chosen

    def _race(self, variants: Sequence[str], what: speed.Trial) -> speed.Times:
        """Seconds a call of those variants that the device can have after all."""
        usable = []
        for variant in variants:
            with suppress(selftest.Quarantined, InvalidArgument, OutOfMemory):
                self.pipeline(what.op, variant)
                usable.append(variant)
        with suppress(InvalidArgument, OutOfMemory):
            return self._backend._aside(lambda: speed.race(self._backend, usable, what))
        return {}

    def _try(self, op: str, variant: str) -> str:
        """Self-test of a variant; what is wrong with it."""
        name, sha = f"{op}.{variant}", kernels.manifest()[op][variant]["sha256"]
        backend, repeats = self._backend, selftest.REPEATS if self._verdicts.doubted(sha) else 1
        try:
            return backend._aside(lambda: selftest.run(backend, [name], repeats).get(name, ""))
        except BaseException:
            del self._made[op, variant]
            raise
