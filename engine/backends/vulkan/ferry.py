# SPDX-License-Identifier: Apache-2.0
"""The way of large inputs and outputs where the device's memory is not the host's: one copy command
each way, in the submission that needs it. The other end is memory of the host that was adopted (a
frame ring), or staging, to and from which the host copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from engine.backends.base import Array, Into
from engine.backends.vulkan import api

if TYPE_CHECKING:
    from engine.backends.vulkan.backend import VulkanBackend

_MOST = 64  # recordings that are kept: both ways, by slots of a ring and bands of a frame


class Adoption:
    """Host memory that the device knows; `memory` is kept alive until it is closed."""

    def __init__(self, backend: VulkanBackend, memory: Array) -> None:
        """Raises:
        PvrError: the driver does not take it.
        """
        self._backend, self._memory = backend, memory
        self.begin, self.end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
        with ExitStack() as stack:
            handle = backend._device.adopt(stack, memory)
            self.placed = api.Placed(handle, memory.nbytes, None)
            self._stack = stack.pop_all()
        backend._adopted.append(self)

    def close(self) -> None:
        """The device forgets it. Nothing that runs may still use it."""
        if self in self._backend._adopted:
            self._backend._adopted.remove(self)
            self._backend._release(self._stack)


class Ferry:
    """What one executable's large buffers need. `buffers`: those, in the device's memory."""

    def __init__(self, backend: VulkanBackend, buffers: Mapping[str, api.Placed]) -> None:
        self._backend, self._buffers = backend, buffers
        self._staged: dict[str, api.Placed] = {}
        self._sent: dict[str, list[api.Copy]] = {}  # uploads for the next submission
        self._slots: list[Any] = []  # command buffers
        self._known: dict[Any, tuple[int, list[api.Copy]]] = {}  # what was recorded: in which
        self.stack = ExitStack()

    def __contains__(self, name: str) -> bool:
        return name in self._buffers

    def write(self, name: str, source: Array, offset: int) -> bool:
        """Sends bytes with the next submission. False: other bytes that are not yet sent lie there;
        they have to go first.
        """
        target, end = self._buffers[name], offset + source.nbytes
        sent = self._sent.get(name, ())
        waiting = [c for c in sent if (c.to, c.to + c.nbytes) != (offset, end)]
        if any(c.to < end and offset < c.to + c.nbytes for c in waiting):
            return False
        counters = self._backend._counters
        counters["bytes_uploaded"] += source.nbytes
        place = self._backend.adopted(source)
        if place is None:
            stage, memory = self._stage(name)
            memory[offset:end] = source
            place = stage, offset
            self._copied(source.nbytes)
        else:
            counters["bytes_direct"] += source.nbytes
        self._sent[name] = [*waiting, api.Copy(*place, target, offset, source.nbytes)]
        return True

    def uploads(self) -> int:
        """Number of the recording that brings what was sent; -1: nothing was."""
        copies = [copy for some in self._sent.values() for copy in some]
        self._sent.clear()
        return self._recording(copies, True) if copies else -1

    def downloads(self, into: Into) -> tuple[int, list[tuple[Array, Array]]]:
        """Number of the recording that brings outputs (-1: none are wanted), and what the host has
        to copy after it: (from, to).
        """
        copies, after = [], []
        for name, target in into.items():
            self._backend._counters["bytes_read_back"] += target.nbytes
            place = self._backend.adopted(target)
            if place is None:
                stage, memory = self._stage(name)
                place = stage, 0
                after.append((memory[: target.nbytes], target.reshape(-1)))
            else:
                self._backend._counters["bytes_direct"] += target.nbytes
            copies.append(api.Copy(self._buffers[name], 0, *place, target.nbytes))
        return (self._recording(copies, False) if copies else -1), after

    def finish(self, after: list[tuple[Array, Array]]) -> None:
        """The host's part of `downloads`."""
        for memory, target in after:
            target[:] = memory
            self._copied(target.nbytes)

    def look(self, name: str, nbytes: int, offset: int) -> tuple[int, Array]:
        """Number of the recording that brings a part of an output to staging, and where."""
        stage, memory = self._stage(name)
        copy = api.Copy(self._buffers[name], offset, stage, offset, nbytes)
        self._backend._counters["bytes_read_back"] += nbytes
        return self._recording([copy], False), memory[offset : offset + nbytes]

    def command(self, number: int) -> list[Any]:
        """The command buffer of a recording."""
        return [self._slots[number]] if number >= 0 else []

    def _copied(self, nbytes: int) -> None:
        self._backend._counters["copies"] += 1
        self._backend._counters["bytes_copied"] += nbytes

    def _stage(self, name: str) -> tuple[api.Placed, Array]:
        """Cached memory of the host as large as a buffer."""
        if name not in self._staged:
            sizes = {name: self._buffers[name].nbytes}
            self._staged |= self._backend._place(self.stack, sizes, "readback")
        staged = self._staged[name]
        assert staged.mapped is not None
        return staged, staged.mapped

    def _recording(self, copies: list[api.Copy], up: bool) -> int:
        key = up, tuple((id(c.source), c.at, id(c.target), c.to, c.nbytes) for c in copies)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST:
                number, _ = self._known.pop(next(iter(self._known)))
            else:
                number = len(self._slots)
                self._slots += self._backend._device.commands(self.stack, 1)
            self._backend._device.carry(self._slots[number], copies, up)
            known = number, copies
        else:
            del self._known[key]
        self._known[key] = known  # the newest is the last
        return known[0]
