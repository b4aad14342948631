# SPDX-License-Identifier: Apache-2.0
"""Holds kernel variants of a device against their numpy references, before answers are believed.

Drivers that compute wrong numbers without an error outnumber those that crash. A variant is tried
at its first use; verdicts can be kept in a file for each device and driver version. A compiler that
hangs or aborts takes the process with it: the successor finds in the file what was being tried.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

import kernels
from engine.backends.base import Array, Backend, DeviceInfo, Limits
from engine.backends.gate import variant_misfit
from engine.errors import DeviceLost, InvalidArgument, OutOfMemory, PvrError
from engine.program import Binding, Buffer, Call, Program
from kernels.contract import PARAM_WORDS
from kernels.samples import Sample, differs, reference, samples

_UNLIMITED = Limits(
    max_workgroup_invocations=1 << 30,
    max_workgroup_size=(1 << 30, 1 << 30, 1 << 30),
    max_shared_bytes=1 << 30,
    max_storage_buffers=1 << 30,
)
Stage = Literal["compile", "run"]


class Quarantined(PvrError):
    """The device computes a kernel wrongly: it is there, but as good as lost for the job."""

    name = "DeviceLost"


TRIES = 2  # ends of a process over one kernel, for which nobody knows the reason
DOUBTS = 2  # times that a kernel is found wrong while it serves
REPEATS = 16  # self-tests of one that was


@dataclass(frozen=True)
class Previous:
    """How the process that had the device before ended, as its supervisor saw it; `how` "" when it
    did not see it. `silent`: it was ended because it did not answer. `ended_by` are the kernels
    (`operation.variant`) over which processes ended since the supervisor began, with what it saw:
    its own memory, for when theirs cannot be written. `spared`: it was ended on purpose, which says
    nothing of what it tried.
    """

    how: str = ""
    silent: bool = False
    ended_by: Mapping[str, str] = field(default_factory=dict)
    spared: bool = False


@dataclass
class _Entry:
    name: str
    wrong: str | None = None  # None: it is being tried
    stage: str = ""
    tries: int = 0
    passed: bool = False  # before it was tried again
    doubts: int = 0  # how often it was found wrong while it served

    @classmethod
    def parse(cls, v: dict[str, Any]) -> _Entry:
        name, doubts = str(v["name"]), int(v.get("doubts", 0))
        if "trying" not in v:
            return cls(name, str(v["wrong"]), doubts=doubts)
        return cls(name, None, str(v["trying"]), int(v["tries"]), bool(v["passed"]), doubts)

    def json(self) -> dict[str, str | int | bool]:
        out: dict[str, str | int | bool] = {"name": self.name}
        if self.wrong is None:
            out |= {"trying": self.stage, "tries": self.tries, "passed": self.passed}
        else:
            out["wrong"] = self.wrong
        return {**out, "doubts": self.doubts} if self.doubts else out


class Verdicts:
    """What was found for each compiled variant (by the hash of its SPIR-V) of one device and driver
    version; kept in `folder` if there is one. An unreadable file is as good as none.

    That a variant is being tried is written down before. Who finds such an entry knows what ended
    its predecessor: the variant is quarantined at once when `previous` says that it did not end
    well, else (a machine that was switched off?) at the second time. One that passed before is
    tried twice as well: what ended the process was hardly its doing.

    A variant that was found wrong once while it served is tried once more by the next process: a
    bit may flip. `doubted` says that it needs more than the usual test. The second time is the
    last.
    """

    def __init__(
        self, info: DeviceInfo, folder: Path | None, previous: Previous | None = None
    ) -> None:
        p = info.properties
        name = f"{p.get('uuid', 'unknown')}-{p.get('driver_id', 0)}-{p.get('driver_version', 0)}"
        self._path = folder / f"{name}.json" if folder else None
        self.changes = 0  # how often what is known has changed
        self._entries = self._read()
        self._before: dict[str, _Entry | None] = {}  # what `begin` replaced
        self._again: set[str] = set()
        how = previous or Previous()
        for sha, entry in list(self._entries.items()):
            sure = how.how and not entry.passed
            if entry.wrong is None and how.spared:
                self._write(sha, replace(entry, tries=max(0, entry.tries - 1)))
            elif entry.wrong is None and (sure or entry.tries >= TRIES):
                self.put(sha, entry.name, _ended(entry, how))
        self._again = {s for s, e in self._entries.items() if e.wrong and 0 < e.doubts < DOUBTS}
        for name, what in how.ended_by.items():
            self._remember(name, what)

    def _remember(self, name: str, what: str) -> None:
        """A kernel that ended a process, of which nothing was written down."""
        op, _, variant = name.partition(".")
        with contextlib.suppress(OSError, ValueError, KeyError):
            sha = kernels.manifest()[op][variant]["sha256"]
            if sha not in self._entries:
                self.put(sha, name, f"it ended the worker: {what}")

    def _read(self) -> dict[str, _Entry]:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            if self._path is not None:
                found = json.loads(self._path.read_text("utf-8"))
                return {str(sha): _Entry.parse(v) for sha, v in found.items()}
        return {}

    def get(self, sha: str) -> str | None:
        """What is wrong with a variant, "" if nothing, None if it is to be tried."""
        found = self._entries.get(sha)
        return None if found is None or sha in self._again else found.wrong

    def doubted(self, sha: str) -> bool:
        """Was a variant found wrong before, while it served?"""
        found = self._entries.get(sha)
        return found is not None and found.doubts > 0

    def begin(self, sha: str, name: str, stage: Stage) -> None:
        """Writes down, to last even if the machine stops, that a variant is tried from now on."""
        before = self._entries.get(sha)
        if stage == "compile":
            self._before[sha] = before
        known = before or _Entry(name)
        tries, passed = known.tries + (stage == "compile"), known.passed or known.wrong == ""
        self._write(sha, _Entry(name, None, stage, tries, passed, known.doubts), sync=True)

    def put(self, sha: str, name: str, wrong: str, serving: bool = False) -> None:
        """Writes a verdict down, `serving`: by a check of running work. A file that cannot be
        written means that it is found again.
        """
        before = self._entries.get(sha)
        doubts = before.doubts if before else 0
        if serving:
            doubts += not (before and before.wrong)  # else it is being put aside already
        elif wrong and doubts:
            doubts = DOUBTS
        self._again.discard(sha)
        self._write(sha, _Entry(name, wrong, doubts=doubts))

    def restore(self, sha: str) -> None:
        """Takes `begin` back: what was known of the variant before stands."""
        self._write(sha, self._before.get(sha))

    def _write(self, sha: str, entry: _Entry | None, sync: bool = False) -> None:
        self.changes += 1
        if entry is None:
            self._entries.pop(sha, None)
        else:
            self._entries[sha] = entry
        if self._path is None:
            return
        # What another process found meanwhile stays.
        self._entries = {**self._read(), **self._entries}
        if entry is None:
            self._entries.pop(sha, None)
        text = json.dumps({k: e.json() for k, e in self._entries.items()}, indent=1)
        part = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("w", encoding="utf-8") as f:
                f.write(text)
                if sync:
                    f.flush()
                    os.fsync(f.fileno())
            part.replace(self._path)


def _ended(entry: _Entry, previous: Previous) -> str:
    compiling = entry.stage == "compile"
    if previous.silent:
        return "the driver's compiler did not return" if compiling else "its self-test did not end"
    what = "the driver's compiler" if compiling else "its self-test"
    if previous.how:
        return f"{what} ended the worker: {previous.how}"
    return f"{what} ended the worker or the machine {entry.tries} times"


def run(backend: Backend, only: Iterable[str] = (), repeats: int = 1) -> dict[str, str]:
    """Tries each variant (`only`: those named `operation.variant`), so many times. Gives the wrong
    ones with what is wrong; empty when the device can be trusted.

    Variants for which the device lacks a feature, or that its limits forbid, are left out.

    Raises:
        DeviceLost, InvalidArgument (the device's limits forbid it), OutOfMemory
    """
    bad: dict[str, str] = {}
    wanted = set(only)
    for sample in (s for s in samples() for _ in range(repeats)):
        contract = kernels.op(sample.op)
        name = f"{sample.op}.{sample.variant}"
        if wanted and name not in wanted:
            continue
        variant, info = contract.variant(sample.variant), backend.info
        # Limits are a GPU's: who runs no SPIR-V can run all that need no feature.
        limits = info.limits if info.kind == "gpu" else _UNLIMITED
        if variant_misfit(contract, variant, limits, info.features):
            continue
        try:
            got = call(backend, sample)
        except (DeviceLost, InvalidArgument, OutOfMemory):
            raise  # these say nothing of the kernel
        except PvrError as e:
            bad[name] = str(e)
            continue
        want = reference(sample)
        for bind in contract.bindings:
            share = differs(got[bind.name], want[bind.name], variant.rounds)
            if share:
                bad[name] = f"{share:.1%} of {bind.name} is wrong"
    return bad


def call(backend: Backend, sample: Sample) -> dict[str, Array]:
    """The bindings of one call after it ran on the device."""
    contract = kernels.op(sample.op)
    buffers = {"params": Buffer("params", 4 * PARAM_WORDS, "params")}
    for bind in contract.bindings:
        buffers[bind.name] = Buffer(bind.name, sample.arrays[bind.name].nbytes, "input")
    groups = contract.groups(
        {**sample.push, "tokens": sample.tokens}, contract.variant(sample.variant)
    )
    bindings = tuple(Binding(b.name) for b in contract.bindings)
    push = contract.pack(**sample.push)
    calls = (Call(sample.op, sample.variant, bindings, push, groups),)
    weights = backend.weights({})
    exe = backend.executable(Program(buffers, {"once": calls}), weights)
    try:
        exe.write("params", np.array(sample.params, np.uint32))
        for name, array in sample.arrays.items():
            exe.write(name, array)
        exe.run("once")
        return {
            name: exe.read(name, array.nbytes).view(array.dtype).reshape(array.shape)
            for name, array in sample.arrays.items()
        }
    finally:
        exe.close()
        weights.close()
