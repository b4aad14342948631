# SPDX-License-Identifier: Apache-2.0
"""Large inputs and outputs, by copies of the device's, from and to adopted memory and elsewhere."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest

from engine.backends.base import Array, Backend
from engine.backends.cpu import CpuBackend
from engine.backends.devices import MemoryType
from engine.backends.null import NullBackend
from engine.backends.vulkan import recording
from engine.backends.vulkan.imports import Importer
from engine.dmabuf import DmaBuf
from engine.errors import InvalidArgument, PvrError
from tests.engine.backends.conftest import PARAMS, chain, chain_data, open_gpu

PAGE = 4096


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A GPU whose memory the host does not see, and for which no buffer is too small."""
    monkeypatch.setattr(recording, "LARGE", 1)
    backend = open_gpu(force_staging=True, profile="")  # profiles import no host memory
    yield backend
    backend.close()


def shared(pages: int) -> Array:
    """A memfd's memory, mapped as a frame ring is."""
    fd = os.memfd_create("ring")
    os.ftruncate(fd, pages * PAGE)
    memory = np.frombuffer(mmap.mmap(fd, pages * PAGE), np.uint8)
    os.close(fd)
    return memory


def grown(backend: Backend, before: dict[str, int]) -> dict[str, int]:
    after = backend.counters()
    names = ("submissions", "copies", "bytes_copied", "bytes_direct")
    return {name: after[name] - before[name] for name in names}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "input", "output", "both"])
def test_each_way_has_one_copy_at_most(far: Backend, kind: str) -> None:
    ring = shared(6)
    adopted = far.adopt(ring)
    assert adopted is not None
    exe = far.executable(chain(), far.weights({"w": chain_data()[1]}))
    exe.write("params", PARAMS)
    for turn in range(8):  # other bytes each time, in other places
        x, _, want = chain_data(turn)
        given = x.view(np.uint8).reshape(-1)
        at = turn % 3 * 2 * PAGE
        if kind in ("input", "both"):
            place = ring[at : at + given.size]
            place[:] = given
            given = place
        y = np.empty(4 * want.size, np.uint8)
        if kind in ("output", "both"):
            y = ring[at + 7 : at + 7 + 4 * want.size]
        before = far.counters()
        exe.write("x", given)
        exe.run("first", "second", into={"y": y})
        count = grown(far, before)
        direct = given.size * (kind in ("input", "both")) + y.size * (kind in ("output", "both"))
        copied = given.size + y.size - direct
        assert count == {
            "submissions": 1,
            "copies": {"none": 2, "both": 0}.get(kind, 1),
            "bytes_copied": copied,
            "bytes_direct": direct,
        }
        got = y.copy().view(np.float32).reshape(want.shape)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    exe.close()
    adopted.close()
    assert far.adopted(ring) is None  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_parts_that_meet_arrive_in_order(far: Backend) -> None:
    exe = far.executable(chain(), far.weights({"w": chain_data()[1]}))
    exe.write("x", bytes(range(200)), 10)
    exe.write("x", b"\xff" * 50, 100)  # over a part of it
    exe.write("x", b"\xee" * 50, 100)  # and over this one
    exe.write("x", b"\x11" * 4, 300)  # elsewhere
    want = np.zeros(304, np.uint8)
    want[10:210] = np.arange(200)
    want[100:150], want[300:304] = 0xEE, 0x11
    assert exe.read("x", 304).tolist() == want.tolist()


@pytest.mark.gpu
def test_what_will_be_looked_at_comes_with_the_slice(
    far: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    exe = far.executable(chain(), far.weights({"w": chain_data()[1]}))
    exe.write("params", PARAMS)
    submissions = []
    submit = far._submit
    monkeypatch.setattr(far, "_submit", lambda *given: (submissions.append(1), submit(*given))[1])
    for turn in range(3):
        x, _, want = chain_data(turn)
        submissions.clear()
        exe.write("x", x)
        exe.run("first", "second", into={"y": 4 * want.size})
        y = exe.look("y", 4 * want.size).view(np.float32).reshape(want.shape)
        assert len(submissions) == 1
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-6)
    exe.write("y", b"later")
    assert bytes(exe.look("y", 5)) == b"later"


@pytest.mark.gpu
def test_many_places_need_no_more_recordings_than_are_kept(far: Backend) -> None:
    exe = far.executable(chain(), far.weights({"w": chain_data()[1]}))
    ring = shared(2)
    assert far.adopt(ring) is not None
    exe.write("params", PARAMS)
    x, _, _ = chain_data(3)
    exe.write("x", x)
    exe.run("first", "second")
    want = exe.read("y", 64).tolist()
    for at in [*range(150), *range(20)]:
        exe.run("second", into={"y": ring[at * 4 : at * 4 + 64]})
        assert ring[at * 4 : at * 4 + 64].tolist() == want
        assert exe.look("y", 60, 4).tolist() == want[4:]
        ring[:] = 0


@pytest.mark.gpu
def test_what_cannot_be_adopted_is_copied(far: Backend) -> None:
    ring = shared(2)
    for memory in (ring[8:], ring[:100]):  # no whole pages
        assert far.adopt(memory) is None
    exe = far.executable(chain(), far.weights({"w": chain_data()[1]}))
    for buffer, nbytes in (("y", 1 << 20), ("none", 4)):
        with pytest.raises(InvalidArgument):
            exe.run("first", into={buffer: np.empty(nbytes, np.uint8)})


@pytest.mark.parametrize("backend", [NullBackend(), CpuBackend(1)], ids=["null", "cpu"])
def test_where_host_and_device_are_one_nothing_is_adopted(backend: Backend) -> None:
    assert backend.adopt(shared(1)) is None
    exe = backend.executable(chain(), backend.weights({"w": chain_data()[1]}))
    exe.write("y", b"abcd")
    y = np.zeros(4, np.uint8)
    exe.fetch({"y": y})
    assert bytes(y) == b"abcd"


@pytest.mark.gpu
def test_outputs_of_uncached_memory_go_to_what_was_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LARGE", 1)
    backend: Any = open_gpu(profile="")
    plan = backend._plan
    assert backend.adopt(shared(1)) is None  # nothing would be gained
    backend._plan = replace(plan, readback=replace(plan.readback, cached=False))
    ring = shared(2)
    assert backend.adopt(ring) is not None
    x, _, want = chain_data(5)
    exe = backend.executable(chain(), backend.weights({"w": chain_data()[1]}))
    exe.write("params", PARAMS)
    exe.write("x", x)
    for y, direct in ((ring[: 4 * want.size], True), (np.empty(4 * want.size, np.uint8), False)):
        before = backend.counters()
        exe.run("first", "second", into={"y": y})
        count = grown(backend, before)
        assert (count["bytes_direct"], count["bytes_copied"]) == (
            (y.size, 0) if direct else (0, y.size)
        )
        got = y.copy().view(np.float32).reshape(want.shape)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    backend.close()


class Kernel:
    """udmabuf and dma-bufs, played: what was asked, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.asked: list[Any] = []
        self.node = folder / "udmabuf"
        self.node.touch()
        monkeypatch.setattr("engine.dmabuf.fcntl.ioctl", self.ioctl)

    def ioctl(self, fd: int, what: int, data: bytearray) -> int:
        if what == 0x40187542:
            self.asked.append(("create", struct.unpack("=IIQQ", data)[1:]))
            return os.dup(fd)
        assert what == 0x40086200
        self.asked.append({3: "host", 7: "device"}[struct.unpack("=Q", data)[0]])
        return 0


def test_a_dma_buf_begins_with_the_hosts_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = Kernel(monkeypatch, tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with DmaBuf(0, 8192, str(kernel.node)) as made:
        made.to_device()
        made.to_host()
    assert kernel.asked == [("create", (1, 0, 8192)), "host", "device", "host"]
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError):
        DmaBuf(0, 8192, str(tmp_path / "none"))


@pytest.mark.gpu
def test_turns_change_around_each_submission(
    far: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A driver that imports dma-bufs alone; the import itself is the host pointer's."""
    kernel = Kernel(monkeypatch, tmp_path)
    monkeypatch.setattr("engine.dmabuf.DmaBuf.__init__.__defaults__", (str(kernel.node),))
    ring = shared(2)
    monkeypatch.setattr(Importer, "dma_buf", lambda self, stack, fd, n: self.host(stack, ring))
    far.info = replace(far.info, features=far.info.features - {"host_memory"} | {"dma_buf"})
    assert far.adopt(ring) is None  # without the memfd
    adopted = far.adopt(ring, 0)
    exe = far.executable(chain(), far.weights({"w": chain_data()[1]}))
    exe.write("params", PARAMS)
    kernel.asked.clear()
    submit = far._submit
    monkeypatch.setattr(
        far, "_submit", lambda *given: (kernel.asked.append("submit"), submit(*given))[1]
    )
    x, _, want = chain_data(4)
    given = ring[: 4 * x.size]
    given[:] = x.view(np.uint8).reshape(-1)
    y = np.empty(4 * want.size, np.uint8)
    exe.write("x", given)
    exe.run("first", into={"y": y})
    assert kernel.asked == ["device", "submit", "host"]
    exe.run("second")
    assert kernel.asked[3:] == ["submit"]
    exe.fetch({"y": ring[: 4 * want.size]})
    assert kernel.asked[4:] == ["device", "submit", "host"]
    adopted.close()


class Paper:
    """As much of the package `vulkan` as importing a dma-buf needs."""

    VK_BUFFER_USAGE_TRANSFER_SRC_BIT, VK_BUFFER_USAGE_TRANSFER_DST_BIT = 1, 2
    VK_SHARING_MODE_EXCLUSIVE = 0
    ffi = Namespace(addressof=lambda thing: thing)

    def __init__(self, bits: int, size: int, fails: str = "") -> None:
        self.bits, self.size, self.fails = bits, size, fails
        self.asked: list[str] = []
        self.taken = -1

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("vk"):
            return lambda **given: Namespace(**given)

        def function(*given: Any) -> Any:
            self.asked.append(name)
            return name

        return function

    def vkGetDeviceProcAddr(self, dev: Any, name: str) -> Any:
        def ask(dev: Any, kind: int, fd: int, found: Any) -> None:
            found.memoryTypeBits = self.bits

        return ask

    def vkGetBufferMemoryRequirements(self, dev: Any, buffer: Any) -> Any:
        return Namespace(memoryTypeBits=6, size=self.size)

    def vkAllocateMemory(self, dev: Any, info: Any, _: Any) -> str:
        assert (info.memoryTypeIndex, info.allocationSize) == (2, 8192)
        assert info.pNext.pNext.buffer == "vkCreateBuffer"
        if self.fails:
            raise PvrError(self.fails)
        self.taken = info.pNext.fd
        return "memory"


@pytest.mark.parametrize(
    ("bits", "size", "fails"),
    [(7, 8192, ""), (7, 8192, "refused"), (1, 8192, "no type"), (7, 9000, "too small")],
)
def test_a_dma_buf_is_the_drivers_only_when_it_takes_it(bits: int, size: int, fails: str) -> None:
    vk = Paper(bits, size, "refused" if fails == "refused" else "")
    types = [MemoryType(i, False, True, i > 0, i == 2, 1 << 30) for i in range(3)]
    importer = Importer(vk, lambda what, function, *given: function(*given), "pd", "dev", types)
    before = set(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        if fails:
            with pytest.raises(PvrError):
                importer.dma_buf(stack, 0, 8192)
        else:
            assert importer.dma_buf(stack, 0, 8192) == "vkCreateBuffer"
            assert vk.asked[-1] == "vkBindBufferMemory"
            os.close(vk.taken)  # it is open: the driver has it
    assert set(os.listdir("/proc/self/fd")) == before
    assert "vkDestroyBuffer" in vk.asked
    assert ("vkFreeMemory" in vk.asked) == (not fails)
