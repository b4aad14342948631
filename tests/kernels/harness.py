# SPDX-License-Identifier: Apache-2.0
"""Runs one call of any operation on any backend and holds it against the numpy reference."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kernels
from engine.backends import cpu
from engine.backends.base import Backend
from engine.backends.host import HostExecutable
from engine.program import Binding, Buffer, Call, Program
from kernels.contract import PARAM_WORDS, Groups

Array = npt.NDArray[Any]
GUARD = 256  # bytes behind each binding that no kernel may touch
_GUARD_BYTE = 0xA5


@contextlib.contextmanager
def out_of_bounds(exe: Any, sizes: Mapping[str, int]) -> Iterator[None]:
    """Under AddressSanitizer (python -m tools.sanitize) the guards must not even be read."""
    process = ctypes.CDLL(None)
    if not isinstance(exe, HostExecutable) or not hasattr(process, "__asan_poison_memory_region"):
        yield
        return
    guards = [exe.view(name)[size:] for name, size in sizes.items()]
    for guard in guards:
        process.__asan_poison_memory_region(
            ctypes.c_void_p(guard.ctypes.data), ctypes.c_size_t(guard.nbytes)
        )
    try:
        yield
    finally:
        for guard in guards:
            process.__asan_unpoison_memory_region(
                ctypes.c_void_p(guard.ctypes.data), ctypes.c_size_t(guard.nbytes)
            )


def variants(op: str) -> list[str]:
    """The names of an operation's variants, for parametrize."""
    return [v.name for v in kernels.op(op).variants]


def one_call(
    op: str,
    variant: str,
    push: Mapping[str, float | int],
    sizes: Mapping[str, int],
    tokens: int,
    most: Groups = (65535, 65535, 65535),
) -> Program:
    """A Program of one call; a buffer for each binding, with a guard behind it."""
    contract = kernels.op(op)
    buffers = {"params": Buffer("params", 4 * PARAM_WORDS, "params")}
    bindings = []
    for bind in contract.bindings:
        buffers[bind.name] = Buffer(bind.name, sizes[bind.name] + GUARD, "input")
        bindings.append(Binding(bind.name, 0, sizes[bind.name]))
    groups = contract.groups({**push, "tokens": tokens, "most": most}, contract.variant(variant))
    call = Call(op, variant, tuple(bindings), contract.pack(**push), groups)
    return Program(buffers, {"once": (call,)})


@dataclass
class Runner:
    """A backend with the instruction set that it has to use ('' where there is none to choose)."""

    backend: Backend
    isa: str = ""

    def variants(self, op: str, baseline: str) -> list[str]:
        """The variants to try for a baseline one: it and, on a GPU that can have them, the faster
        ones. The C kernels know no variants.
        """
        misfit = getattr(self.backend, "misfit", None)
        if self.backend.info.kind != "gpu" or misfit is None:
            return [baseline]
        stem = "" if baseline == "base" else f"{baseline}_"
        more = [v.name for v in kernels.op(op).variants if not v.baseline]
        return [baseline, *(v for v in more if v.startswith(stem) and not misfit(op, v))]

    def run(
        self,
        op: str,
        variant: str,
        push: Mapping[str, float | int],
        arrays: Mapping[str, Array],
        params: Sequence[int] = (),
        tokens: int = 1,
        times: int = 1,
    ) -> dict[str, Array]:
        """The arrays after one call on the backend, or after `times` slices of as many calls.

        Asserts that read-only bindings and what lies behind each binding are untouched.
        """
        contract = kernels.op(op)
        if self.isa:
            getattr(self.backend, "set_isa", cpu.set_isa)(self.isa)
        lacking = contract.variant(variant).needs - self.backend.info.features
        if lacking and self.backend.info.kind == "gpu":
            pytest.skip(f"the device has no {', '.join(sorted(lacking))}")
        given = {b.name: np.ascontiguousarray(arrays[b.name]) for b in contract.bindings}
        sizes = {n: a.nbytes for n, a in given.items()}
        most = self.backend.info.limits.max_workgroup_count
        program = one_call(op, variant, push, sizes, tokens, most)
        sequences = {name: calls * times for name, calls in program.sequences.items()}
        program = replace(program, sequences=sequences)
        weights = self.backend.weights({})
        guard = np.full(GUARD, _GUARD_BYTE, np.uint8)
        exe = self.backend.executable(program, weights)
        try:
            exe.write("params", _words(params, tokens))
            for name, array in given.items():
                exe.write(name, array)
                exe.write(name, guard, array.nbytes)
            with out_of_bounds(exe, {name: array.nbytes for name, array in given.items()}):
                for _ in range(times):
                    exe.run("once")
            after = {}
            for bind in contract.bindings:
                array = given[bind.name]
                raw = exe.read(bind.name, array.nbytes + GUARD)
                assert (raw[array.nbytes :] == guard).all(), f"{op} wrote behind {bind.name}"
                after[bind.name] = raw[: array.nbytes].view(array.dtype).reshape(array.shape)
                if bind.access == "r":
                    same = raw[: array.nbytes] == array.reshape(-1).view(np.uint8)
                    assert same.all(), f"{op} wrote to {bind.name}, which it may only read"
            return after
        finally:
            exe.close()
            weights.close()

    def check_op(
        self,
        op: str,
        variant: str,
        push: Mapping[str, float | int],
        arrays: Mapping[str, Array],
        params: Sequence[int] = (),
        tokens: int = 1,
        tolerance: float | tuple[float, float] = 1e-5,
    ) -> dict[str, Array]:
        """Runs the call and compares each written binding with the reference; gives what the
        backend wrote.

        `arrays` has the contents before the call by binding name, outputs too (fill them with
        something that shows, such as NaN). `params` are the parameter words from the first on;
        without it n_tokens is `tokens`. Integers have to be equal; floats equal within `tolerance`
        (absolute, relative), NaN where NaN is wanted.
        """
        want = reference(op, push, arrays, params, tokens)
        got = self.run(op, variant, push, arrays, params, tokens)
        atol, rtol = tolerance if isinstance(tolerance, tuple) else (tolerance, tolerance)
        for bind in kernels.op(op).bindings:
            if bind.access == "r":
                continue
            label = f"{op}.{variant} on {self.isa or self.backend.info.name}: {bind.name}"
            a, b = got[bind.name], want[bind.name]
            if a.dtype.kind == "f":
                with np.errstate(
                    invalid="ignore"
                ):  # any bit pattern may be there, signalling NaN too
                    a, b = a.astype(np.float64), b.astype(np.float64)
                np.testing.assert_allclose(a, b, rtol, atol, err_msg=label)
            else:
                np.testing.assert_array_equal(a, b, err_msg=label)
        return got


def reference(
    op: str,
    push: Mapping[str, float | int],
    arrays: Mapping[str, Array],
    params: Sequence[int] = (),
    tokens: int = 1,
) -> dict[str, Array]:
    """The arrays after the numpy reference; the given ones stay as they are."""
    contract = kernels.op(op)
    copies = {b.name: np.array(arrays[b.name], order="C") for b in contract.bindings}
    flat = {n: a.reshape(-1).view(np.uint8) for n, a in copies.items()}
    contract.reference(_words(params, tokens), flat, contract.unpack(contract.pack(**push)))
    return copies


def _words(params: Sequence[int], tokens: int) -> npt.NDArray[np.uint32]:
    words = np.zeros(PARAM_WORDS, np.uint32)
    given = tuple(params) or (tokens, 0, tokens - 1)
    words[: len(given)] = given
    return words
