# SPDX-License-Identifier: Apache-2.0
"""The way of large inputs and outputs where the device's memory is not the host's: one copy command
each way, in the submission that needs it. The other end is memory of the host that was adopted (a
frame ring), or staging, to and from which the host copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from engine.backends.base import Array, Into
from engine.backends.vulkan import api
from engine.dmabuf import DmaBuf
from engine.errors import PvrError
from engine.memory import copy

if TYPE_CHECKING:
    from engine.backends.vulkan.backend import VulkanBackend

_MOST = 64  # recordings that are kept: both ways, by slots of a ring and bands of a frame


class Adoption:
    """Host memory that the device knows; `memory` is kept alive until it is closed. `fd`: the memfd
    that it maps from its beginning, or -1.
    """

    def __init__(self, backend: VulkanBackend, memory: Array, fd: int) -> None:
        """Raises:
        PvrError, OSError: neither way is there for this memory.
        """
        self._backend, self._memory = backend, memory
        self._shared: DmaBuf | None = None
        self.begin, self.end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
        features, imports = backend.info.features, backend._device.imports
        with ExitStack() as stack:
            handle: Any = None
            if "host_memory" in features:
                with suppress(PvrError):
                    handle = imports.host(stack, memory)
            if handle is None:
                if "dma_buf" not in features or fd < 0:
                    raise PvrError(f"{backend.info.name} does not import this memory")
                self._shared = stack.enter_context(DmaBuf(fd, memory.nbytes))
                handle = imports.dma_buf(stack, self._shared.fd, memory.nbytes)
            self.placed = api.Placed(handle, memory.nbytes, None)
            self._stack = stack.pop_all()
        backend._adopted.append(self)

    def to_device(self) -> None:
        """Before a submission that uses it."""
        if self._shared is not None:
            self._shared.to_device()

    def to_host(self) -> None:
        """After that."""
        if self._shared is not None:
            self._shared.to_host()

    def close(self) -> None:
        """The device forgets it. Nothing that runs may still use it."""
        if self in self._backend._adopted:
            self._backend._adopted.remove(self)
            self._backend._release(self._stack)


class Ferry:
    """What one executable's large buffers need. `buffers`: those, in the device's memory. `slow`:
    outputs that the host can read as they lie, but slowly; adopted memory is better for them.
    """

    def __init__(
        self,
        backend: VulkanBackend,
        buffers: Mapping[str, api.Placed],
        slow: Mapping[str, api.Placed],
    ) -> None:
        self._backend, self._buffers, self._slow = backend, buffers, slow
        self._using: set[Adoption] = set()  # by the next submission
        self._fresh: dict[str, int] = {}  # bytes of outputs that are in staging as the device's
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
        self._backend._counters["bytes_uploaded"] += source.nbytes
        place = self._adopted(source)
        if place is None:
            stage, memory = self._stage(name)
            copy(memory[offset:end], source)
            place = stage, offset
            self._copied(source.nbytes)
        self._sent[name] = [*waiting, api.Copy(*place, target, offset, source.nbytes)]
        return True

    def uploads(self) -> int:
        """Number of the recording that brings what was sent; -1: nothing was."""
        copies = [copy for some in self._sent.values() for copy in some]
        self._sent.clear()
        self._fresh.clear()
        return self._recording(copies, True) if copies else -1

    @property
    def waits(self) -> bool:
        """Is there something that the device has not got yet?"""
        return bool(self._sent)

    def downloads(self, into: Into) -> tuple[int, dict[str, Array]]:
        """Number of the recording that brings outputs (-1: none does), and what is left for the
        host after it: `finish` does that of these buffers, the others are read as they lie.
        """
        copies: list[api.Copy] = []
        left: dict[str, Array] = {}
        for name, target in into.items():
            source = self._buffers.get(name)
            if isinstance(target, int):
                if source is not None:
                    copies.append(api.Copy(source, 0, self._stage(name)[0], 0, target))
                    self._fresh[name] = target
                continue
            source = source or self._slow.get(name)
            place = self._adopted(target) if source is not None else None
            if place is None:
                left[name] = target
                if name not in self._buffers:
                    continue
                place = self._stage(name)[0], 0
            assert source is not None
            self._backend._counters["bytes_read_back"] += target.nbytes
            copies.append(api.Copy(source, 0, *place, target.nbytes))
        return (self._recording(copies, False) if copies else -1), left

    def finish(self, name: str, target: Array) -> None:
        """The host's part of a download."""
        copy(target.reshape(-1), self._stage(name)[1][: target.nbytes])
        self._copied(target.nbytes)

    def hand_over(self) -> None:
        """Before a submission: it may use what was adopted for it."""
        for one in self._using:
            one.to_device()

    def take_back(self) -> None:
        """After it: the host has that again."""
        for one in self._using:
            one.to_host()
        self._using.clear()

    def _adopted(self, memory: Array) -> tuple[api.Placed, int] | None:
        """Where adopted memory is, which the next submission uses then."""
        found = self._backend.adopted(memory)
        if found is None:
            return None
        self._using.add(found[0])
        self._backend._counters["bytes_direct"] += memory.nbytes
        return found[0].placed, found[1]

    def look(self, name: str, nbytes: int, offset: int) -> tuple[int, Array]:
        """Number of the recording that brings a part of an output to staging (-1: it is there), and
        where.
        """
        stage, memory = self._stage(name)
        self._backend._counters["bytes_read_back"] += nbytes
        if offset + nbytes <= self._fresh.get(name, 0):
            return -1, memory[offset : offset + nbytes]
        copy = api.Copy(self._buffers[name], offset, stage, offset, nbytes)
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
            api.carry(self._slots[number], copies, up)
            known = number, copies
        else:
            del self._known[key]
        self._known[key] = known  # the newest is the last
        return known[0]
