# SPDX-License-Identifier: Apache-2.0
"""Large inputs and outputs, by copies of the device's, from and to adopted memory and elsewhere."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from engine.backends.base import Array, Backend
from engine.backends.cpu import CpuBackend
from engine.backends.null import NullBackend
from engine.backends.vulkan import recording
from engine.errors import InvalidArgument
from tests.engine.backends.conftest import PARAMS, chain, chain_data, open_gpu

PAGE = 4096


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """A GPU whose memory the host does not see, and for which no buffer is too small."""
    monkeypatch.setattr(recording, "LARGE", 1)
    backend = open_gpu(force_staging=True)
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
