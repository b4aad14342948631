# SPDX-License-Identifier: Apache-2.0
"""Holds kernel variants of a device against their numpy references, before answers are believed.

Drivers that compute wrong numbers without an error outnumber those that crash. A variant is tried
at its first use; verdicts can be kept in a file for each device and driver version.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import kernels
from engine.backends.base import Array, Backend, DeviceInfo
from engine.errors import DeviceLost, InvalidArgument, OutOfMemory, PvrError
from engine.program import Binding, Buffer, Call, Program
from kernels.contract import PARAM_WORDS
from kernels.samples import Sample, differs, reference, samples


class Quarantined(PvrError):
    """The device computes a kernel wrongly: it is there, but as good as lost for the job."""

    name = "DeviceLost"


class Verdicts:
    """What was found for each compiled variant (by the hash of its SPIR-V) of one device and driver
    version; kept in `folder` if there is one. An unreadable file is as good as none.
    """

    def __init__(self, info: DeviceInfo, folder: Path | None) -> None:
        p = info.properties
        name = f"{p.get('uuid', 'unknown')}-{p.get('driver_id', 0)}-{p.get('driver_version', 0)}"
        self._path = folder / f"{name}.json" if folder else None
        self._wrong: dict[str, tuple[str, str]] = {}
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
                found = json.loads(self._path.read_text("utf-8"))
                self._wrong = {k: (str(v["name"]), str(v["wrong"])) for k, v in found.items()}

    def get(self, sha: str) -> str | None:
        """What is wrong with a variant, "" if nothing, None if it was not tried."""
        found = self._wrong.get(sha)
        return None if found is None else found[1]

    def put(self, sha: str, name: str, wrong: str) -> None:
        """Writes a verdict down. A file that cannot be written means that it is found again."""
        self._wrong[sha] = (name, wrong)
        if self._path is None:
            return
        entries = {k: {"name": n, "wrong": w} for k, (n, w) in self._wrong.items()}
        part = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(entries, indent=1), "utf-8")
            part.replace(self._path)

    def quarantined(self) -> list[str]:
        """Names (`operation.variant`) of those that are wrong."""
        return sorted({name for name, wrong in self._wrong.values() if wrong})


def run(backend: Backend, only: Iterable[str] = ()) -> dict[str, str]:
    """Tries each variant (`only`: those named `operation.variant`). Gives the wrong ones with what
    is wrong; empty when the device can be trusted.

    Variants for which the device lacks a feature are left out.

    Raises:
        DeviceLost, InvalidArgument (the device's limits forbid it), OutOfMemory
    """
    bad: dict[str, str] = {}
    wanted = set(only)
    for sample in samples():
        contract = kernels.op(sample.op)
        name = f"{sample.op}.{sample.variant}"
        if wanted and name not in wanted:
            continue
        if contract.variant(sample.variant).needs - backend.info.features:
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
            share = differs(got[bind.name], want[bind.name])
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
