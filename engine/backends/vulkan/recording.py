# SPDX-License-Identifier: Apache-2.0
"""Weights on a Vulkan device, and Programs recorded there to be replayed.

A slice is one submission of the command buffers of its sequences and one wait for a fence.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kernels
from engine.backends.base import LARGE, NOTHING, NOWHERE, Array, Into, Lent, RunStats, checked
from engine.backends.gate import Range, call_misfit
from engine.backends.host import as_bytes
from engine.backends.vulkan import api
from engine.backends.vulkan.ferry import Ferry
from engine.backends.vulkan.hazards import Hazards
from engine.backends.vulkan.pipelines import Pipeline
from engine.errors import InvalidArgument
from engine.program import Buffer, Call, Program
from kernels.contract import ceil_div

if TYPE_CHECKING:
    from engine.backends.vulkan.backend import VulkanBackend


_SCRATCH = " scratch"  # the buffer of which calls get theirs; no program's buffer has a space
_TURNS = 8  # calls after one another whose scratch memory is apart, so that they may overlap
_ALIGN = 256
_USES = ("device", "upload", "readback", "apart")  # memory, as VulkanBackend._place names it
_USE_OF = {"params": "upload", "input": "upload", "output": "readback"}  # kinds of buffers


@dataclass(frozen=True)
class _Plan:
    """A call with what it touches: all ranges, whether it reads or writes each, those that it has
    bound, and the push constants with addresses behind them.
    """

    call: Call
    pipe: Pipeline
    ranges: tuple[Range, ...]
    access: tuple[str, ...]
    bound: tuple[Range, ...]
    push: bytes

    @property
    def key(self) -> tuple[int, int, tuple[Range, ...]]:
        """Calls with the same one share a descriptor set."""
        return self.pipe.layout.count, self.call.params, self.bound


class VulkanWeights:
    """Named blobs in device memory."""

    def __init__(self, backend: VulkanBackend, blobs: Mapping[str, Array]) -> None:
        self._backend = backend
        with ExitStack() as stack:
            flat = {name: as_bytes(blob) for name, blob in blobs.items()}
            sizes = {name: max(blob.nbytes, 4) for name, blob in flat.items()}
            self._nbytes = sum(sizes.values())
            self.buffers = backend._place(stack, sizes, "device")
            for name, blob in flat.items():
                backend._upload(self.buffers[name], blob, 0)
            self._stack = stack.pop_all()
        backend._live.add(self)

    def nbytes(self) -> int:
        return self._nbytes

    def close(self) -> None:
        """Frees them. Executables that use them have to be closed before."""
        self.buffers = {}
        self._backend._live.discard(self)
        self._backend._release(self._stack)


class VulkanExecutable:
    """A Program recorded as one command buffer a sequence, over buffers of its own."""

    def __init__(
        self,
        backend: VulkanBackend,
        program: Program,
        weights: VulkanWeights,
        lent: Lent = NOTHING,
    ) -> None:
        self.program = checked(program)
        self._backend = backend
        self._weights = weights  # recordings point into them
        self._submissions: dict[tuple[tuple[str, ...], int, int], Any] = {}
        self._dispatches: dict[str, list[api.Dispatch]] = {}
        self._singles: dict[str, list[Any]] = {}
        self._closed = False
        calls = [c for some in program.sequences.values() for c in some]
        for call in calls:
            self._fit(call)
        self._pipes = {(c.op, c.variant): backend.pipeline(c.op, c.variant) for c in calls}
        with ExitStack() as stack:
            self._buffers = self._allocate(stack, lent)
            self._recorded = self._record(stack)
            stack.push(self._ferry.stack)
            self._stack = stack.pop_all()
        backend._live.add(self)

    def _allocate(self, stack: ExitStack, lent: Lent) -> dict[str, api.Placed]:
        """All buffers of the program: lent ones, weights, and its own in memory of their use."""
        own: dict[str, dict[str, int]] = {use: {} for use in _USES}
        out: dict[str, api.Placed] = {}
        for buf in self.program.buffers.values():
            if buf.name in lent:
                lender, name = lent[buf.name]
                out[buf.name], _ = lender._range(name, buf.nbytes, 0)
            elif buf.kind == "weight":
                out[buf.name] = self._weight(buf)
            else:
                own[self._use(buf)][buf.name] = buf.nbytes
        calls = [c for some in self.program.sequences.values() for c in some]
        if scratch := max(map(self._scratch_nbytes, calls), default=0):
            own["device"][_SCRATCH] = _TURNS * scratch
        for use, sizes in own.items():
            made = self._backend._place(stack, sizes, use)
            for placed in made.values():
                self._backend._zero(placed)
            out |= made
        large = [n for n, nbytes in own["readback"].items() if nbytes >= LARGE]
        slow = [] if self._backend._plan.readback.cached else large
        self._ferry = Ferry(
            self._backend, {n: out[n] for n in own["apart"]}, {n: out[n] for n in slow}
        )
        return out

    def _weight(self, buf: Buffer) -> api.Placed:
        placed = self._weights.buffers.get(buf.name)
        if placed is None or placed.nbytes < buf.nbytes:
            raise InvalidArgument(f"the weights have no {buf.name!r} of {buf.nbytes} bytes")
        return placed

    def _use(self, buf: Buffer) -> str:
        """Which memory a buffer lies in, as VulkanBackend._place names them."""
        through = buf.kind in ("input", "output")  # the host's on one side
        if self._backend._plan.apart and through and buf.nbytes >= LARGE:
            return "apart"
        return _USE_OF.get(buf.kind, "device")

    def _record(self, stack: ExitStack) -> dict[str, Any]:
        device = self._backend._device
        plans = {
            name: [self._plan(call, i) for i, call in enumerate(calls)]
            for name, calls in self.program.sequences.items()
        }
        wanted = {}
        for plan in (p for some in plans.values() for p in some):
            ranges = [(self._buffers[n], begin, end - begin) for n, begin, end in plan.bound]
            wanted[plan.key] = (plan.pipe.layout, plan.call.params, ranges)
        made = device.descriptors(stack, self._buffers["params"], list(wanted.values()))
        sets = dict(zip(wanted, made, strict=True))
        commands = device.commands(stack, len(plans)) if plans else []
        for cmd, (name, some) in zip(commands, plans.items(), strict=True):
            hazards = Hazards()
            self._dispatches[name] = [
                api.Dispatch(
                    plan.pipe.handle,
                    plan.pipe.layout,
                    sets[plan.key],
                    plan.push,
                    plan.call.groups,
                    hazards.add(plan.ranges, plan.access),
                )
                for plan in some
            ]
            api.record(cmd, self._dispatches[name])
        return dict(zip(plans, commands, strict=True))

    def _fit(self, call: Call) -> None:
        """Holds a call against the device's limits and its contract: a driver would not say no."""
        info, contract = self._backend.info, kernels.op(call.op)
        why = self._backend.misfit(call.op, call.variant) or call_misfit(
            contract,
            contract.variant(call.variant),
            call.push,
            call.groups,
            self._ranges(call),
            info.limits,
        )
        if why:
            raise InvalidArgument(f"{call.op}.{call.variant} is not for {info.name}: {why}")

    def _plan(self, call: Call, number: int) -> _Plan:
        """The call, the number-th of its sequence."""
        pipe = self._pipes[call.op, call.variant]
        contract, variant = pipe.contract, pipe.variant
        ranges = self._ranges(call)
        access: list[str] = [b.access for b in contract.bindings]
        push = call.push
        if variant.addressed:
            at = [
                self._buffers[name].address + begin
                for bind, (name, begin, _) in zip(contract.bindings, ranges, strict=True)
                if bind.name in variant.addressed
            ]
            push += bytes(-len(push) % 8) + struct.pack(f"<{len(at)}Q", *at)
        bound = [ranges[i] for i in contract.storage(variant)]
        if scratch := self._scratch_nbytes(call):
            begin = number % _TURNS * (self._buffers[_SCRATCH].nbytes // _TURNS)
            own = (_SCRATCH, begin, begin + scratch)
            ranges.append(own)
            access.append("rw")
            bound.append(own)
        return _Plan(call, pipe, tuple(ranges), tuple(access), tuple(bound), push)

    def _scratch_nbytes(self, call: Call) -> int:
        """Bytes of scratch memory that a call wants, a multiple of _ALIGN."""
        pipe = self._pipes[call.op, call.variant]
        if pipe.variant.scratch is None:
            return 0
        return ceil_div(pipe.variant.scratch(pipe.contract.unpack(call.push)), _ALIGN) * _ALIGN

    def _ranges(self, call: Call) -> list[Range]:
        out = []
        for b in call.bindings:
            end = self.program.buffers[b.buffer].nbytes if b.nbytes is None else b.offset + b.nbytes
            out.append((b.buffer, b.offset, end))
        return out

    def _range(self, name: str, nbytes: int, offset: int) -> tuple[api.Placed, Buffer]:
        if self._closed:
            raise InvalidArgument("the executable is closed")
        buf = self.program.buffers.get(name)
        if buf is None:
            raise InvalidArgument(f"there is no buffer {name!r}")
        if offset < 0 or nbytes < 0 or offset + nbytes > buf.nbytes:
            raise InvalidArgument(
                f"{nbytes} bytes at {offset} are outside of {name!r} ({buf.nbytes} bytes)"
            )
        return self._buffers[name], buf

    def write(self, buffer: str, data: Array | bytes, offset: int = 0) -> None:
        source = as_bytes(data)
        placed, buf = self._range(buffer, source.nbytes, offset)
        if buf.kind == "weight":
            raise InvalidArgument(f"{buffer!r} is a weight")
        if buffer not in self._ferry:
            self._backend._upload(placed, source, offset)
            self._copied(buffer, source.nbytes)
        elif not self._ferry.write(buffer, source, offset):
            self._send()
            self._ferry.write(buffer, source, offset)

    def _copied(self, buffer: str, nbytes: int) -> None:
        if self.program.buffers[buffer].nbytes >= LARGE:
            self._backend._counters["copies"] += 1
            self._backend._counters["bytes_copied"] += nbytes

    def _send(self) -> None:
        """Brings what was written to the device without a slice."""
        self._carry(self._ferry.uploads())

    def _carry(self, number: int) -> None:
        """A submission that only copies."""
        self._ferry.hand_over()
        self._submit(self._ferry.command(number), count=False)
        self._ferry.take_back()

    def read(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        placed, buf = self._range(buffer, nbytes, offset)
        if buf.kind == "output" and buffer in self._ferry:
            return self.look(buffer, nbytes, offset).copy()
        self._send()
        return self._backend._download(placed, nbytes, offset)

    def look(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        placed, buf = self._range(buffer, nbytes, offset)
        if buf.kind == "output" and buffer in self._ferry:
            if self._ferry.waits:
                self._send()
            number, seen = self._ferry.look(buffer, nbytes, offset)
            self._carry(number)
            return seen
        if buf.kind != "output" or placed.mapped is None or not self._backend._plan.readback.cached:
            return self.read(buffer, nbytes, offset)
        self._backend._counters["bytes_read_back"] += nbytes
        return placed.mapped[offset : offset + nbytes]

    def fetch(self, into: Into) -> None:
        self._meant(into)
        number, left = self._ferry.downloads(into)
        self._carry(number)
        self._finish(left)

    def _meant(self, into: Into) -> None:
        """Raises InvalidArgument: it is no part of the program's buffers."""
        for name, target in into.items():
            self._range(name, target if isinstance(target, int) else target.nbytes, 0)

    def _finish(self, left: Mapping[str, Array]) -> None:
        """The host's part of a fetch."""
        for name, target in left.items():
            if name in self._ferry:
                self._ferry.finish(name, target)
            else:
                target.reshape(-1)[:] = self.look(name, target.nbytes)
                self._copied(name, target.nbytes)

    def run(self, *sequences: str, into: Into = NOWHERE) -> RunStats:
        if self._closed:
            raise InvalidArgument("the executable is closed")
        if missing := [s for s in sequences if s not in self._recorded]:
            raise InvalidArgument(f"the program has no sequence {missing[0]!r}")
        self._meant(into)
        ferry = self._ferry
        up = ferry.uploads()
        down, left = ferry.downloads(into)
        submission = self._submissions.get((sequences, up, down))
        if submission is None:
            own = [self._recorded[s] for s in sequences]
            commands = [*ferry.command(up), *own, *ferry.command(down)]
            submission = self._backend._device.submission(commands, timed=True)
            self._submissions[sequences, up, down] = submission
        with self._backend._lock:  # the two timestamps are the device's only ones
            started = time.perf_counter()
            ferry.hand_over()
            self._backend._submit(submission)
            ferry.take_back()
            wall = time.perf_counter() - started
            timer = self._backend._device.timer
            device = timer.elapsed() if timer else None
        count = sum(len(self.program.sequences[s]) for s in sequences)
        self._backend._counters["dispatches"] += count
        self._finish(left)
        return RunStats(wall_s=wall, device_s=device)

    def run_apart(
        self,
        sequences: Sequence[str],
        apart: Sequence[int],
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> RunStats:
        """As run, but the calls with these numbers in the slice are submitted alone, in order;
        `before` and `after` are called around each with its number and may read buffers.
        """
        if self._closed:
            raise InvalidArgument("the executable is closed")
        self._send()
        singles = [cmd for name in sequences for cmd in self._single(name)]
        started = time.perf_counter()
        counters = self._backend._counters
        done = 0
        for at in apart:
            self._submit(singles[done:at], count=False)
            before(at)
            # All in all one slice, to those who count slices.
            self._submit(singles[at : at + 1], count=at == apart[0])
            after(at)
            done = at + 1
        self._submit(singles[done:], count=not apart)
        counters["dispatches"] += len(singles)
        return RunStats(wall_s=time.perf_counter() - started)

    def _submit(self, commands: Sequence[Any], count: bool) -> None:
        if commands:
            self._backend._submit(self._backend._device.submission(commands), count)

    def _single(self, name: str) -> list[Any]:
        """A command buffer for each call of a sequence, made when they are first wanted."""
        if name not in self._singles:
            with ExitStack() as stack:
                dispatches = self._dispatches[name]
                commands = self._backend._device.commands(stack, len(dispatches))
                for cmd, dispatch in zip(commands, dispatches, strict=True):
                    api.record(cmd, [dispatch])
                self._singles[name] = commands
                self._stack.push(stack.pop_all())
        return self._singles[name]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._buffers, self._recorded, self._submissions = {}, {}, {}
            self._singles, self._dispatches = {}, {}
            self._backend._live.discard(self)
            self._backend._release(self._stack)
