# SPDX-License-Identifier: Apache-2.0
"""A text program in the making: its buffers, and its calls with the variants and workgroups that
the device gives them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from engine.backends.base import DeviceInfo
from engine.errors import OutOfMemory
from engine.program import Binding, Buffer, Call, Kind, Program
from engine.variants import Allow, choose
from kernels import op as contract_of
from kernels.contract import FORMATS, Contract


class ProgramBuilder:
    """Takes buffers that the device can bind and calls that its grid can hold, in order.

    `buffers` by name, and the calls of each sequence, are there to be read and changed until
    `program` makes one of them. `context`: tokens, for what is said when memory is short.
    """

    def __init__(self, device: DeviceInfo, context: int, allow: Allow) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self._device = device
        self._context = context
        self._allow = allow

    def buffer(self, name: str, nbytes: int, kind: Kind) -> str:
        """Makes a buffer, or one that is there at least so large. Returns its name.

        Raises:
            OutOfMemory: the device cannot bind it.
        """
        most = self._device.limits.max_storage_range
        if nbytes > most:
            raise OutOfMemory(
                f"The buffer {name} would need {nbytes >> 20} MiB for a context of {self._context}"
                f" tokens; the device can bind {most >> 20} MiB at most."
            )
        if name not in self.buffers or self.buffers[name].nbytes < nbytes:
            self.buffers[name] = Buffer(name, nbytes, kind)
        return name

    def call(
        self,
        op: str,
        bindings: Sequence[Binding],
        fmt: str | None,
        push: Mapping[str, float],
        sequence: str,
        tokens: int,
        params: int = 0,
    ) -> None:
        """Adds a call for at most `tokens` tokens to a sequence. `fmt`: of the weights or caches
        that it reads; `params`: where its parameter words lie in the buffer `params`.

        Raises:
            NoKernel: no variant is left.
            OutOfMemory: it takes more workgroups than the device has.
        """
        contract = contract_of(op)
        if fmt is not None:
            push = {**push, "fmt": FORMATS[fmt]}
        large = self._large(contract, bindings)
        call = {**push, "tokens": tokens}
        variant = choose(contract, self._device, fmt, self._allow, call, large)
        most = self._device.limits.max_workgroup_count
        groups = contract.groups({**call, "most": most}, variant)
        if any(g > m for g, m in zip(groups, most, strict=True)):
            raise OutOfMemory(f"The operation {op} needs more workgroups than the device has.")
        self.calls[sequence].append(
            Call(op, variant.name, tuple(bindings), contract.pack(**push), groups, params)
        )

    def _large(self, contract: Contract, bindings: Sequence[Binding]) -> set[str]:
        """Names of those that are more than the device can bind."""
        most = self._device.limits.max_storage_range
        return {
            bind.name
            for bind, b in zip(contract.bindings, bindings, strict=True)
            if (b.nbytes or self.buffers[b.buffer].nbytes - b.offset) > most
        }

    def program(self, meta: Mapping[str, int | str]) -> Program:
        """What was made, checked."""
        sequences = {name: tuple(calls) for name, calls in self.calls.items()}
        program = Program(self.buffers, sequences, dict(meta))
        program.check()
        return program
