# SPDX-License-Identifier: Apache-2.0
"""What holds for every backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.backends.base import Backend
from engine.errors import InvalidArgument, OutOfMemory
from engine.program import Binding, Buffer, Program
from tests.engine.backends.conftest import PARAMS, TOKENS, F, chain, chain_data, swiglu


def test_a_slice_of_two_sequences(backend: Backend) -> None:
    x, w, want = chain_data()
    weights = backend.weights({"w": w.view(np.uint8).reshape(-1)})
    assert weights.nbytes() == w.nbytes
    exe = backend.executable(chain(), weights)
    exe.write("params", PARAMS)
    exe.write("x", x)
    before = backend.counters()
    stats = exe.run("first", "second")
    y = exe.read("y", want.size * 4).view(np.float32).reshape(want.shape)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-6)
    assert stats.wall_s > 0
    after = backend.counters()
    grown = {k: after[k] - before[k] for k in after}
    assert grown == {
        "submissions": 1,
        "dispatches": 3,
        "bytes_uploaded": 0,
        "bytes_read_back": want.size * 4,
        "copies": 0,
        "bytes_copied": 0,
        "bytes_direct": 0,
    }


def test_sequences_can_be_run_one_by_one_and_again(backend: Backend) -> None:
    x, w, want = chain_data(2)
    exe = backend.executable(chain(), backend.weights({"w": w}))
    exe.write("params", PARAMS)
    for seed in (3, 2):
        x, _, want = chain_data(seed)
        exe.write("x", x)
        exe.run("first")
        exe.run("second")
        y = exe.read("y", want.size * 4).view(np.float32).reshape(want.shape)
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-6)


def test_buffers_start_zeroed_and_keep_what_is_written(backend: Backend) -> None:
    exe = backend.executable(chain(), backend.weights({"w": chain_data()[1]}))
    for name in ("x", "h", "g", "y"):
        nbytes = chain().buffers[name].nbytes
        assert not exe.read(name, nbytes).any()
    exe.write("g", b"abcdefg", 13)
    assert bytes(exe.read("g", 9, 12)) == b"\0abcdefg\0"
    w = chain_data()[1]
    assert bytes(exe.read("w", w.nbytes)) == w.tobytes()


def test_executables_do_not_share_their_buffers(backend: Backend) -> None:
    weights = backend.weights({"w": chain_data()[1]})
    one, two = (backend.executable(chain(), weights) for _ in range(2))
    one.write("g", b"\1\2\3\4")
    assert not two.read("g", 4).any()
    one.close()
    assert not two.read("g", 4).any()


def test_what_is_refused(backend: Backend) -> None:
    weights = backend.weights({"w": chain_data()[1]})
    exe = backend.executable(chain(), weights)
    with pytest.raises(InvalidArgument, match="no sequence 'third'"):
        exe.run("first", "third")
    with pytest.raises(InvalidArgument, match="no buffer 'z'"):
        exe.write("z", b"1234")
    with pytest.raises(InvalidArgument, match="outside of 'params'"):
        exe.write("params", bytes(65))
    with pytest.raises(InvalidArgument, match="outside of 'y'"):
        exe.read("y", 8, chain().buffers["y"].nbytes - 4)
    with pytest.raises(InvalidArgument, match="'w' is a weight"):
        exe.write("w", b"1234")
    exe.close()
    exe.close()
    with pytest.raises(InvalidArgument, match="closed"):
        exe.run("first")
    with pytest.raises(InvalidArgument, match="closed"):
        exe.read("y", 4)


def test_programs_that_are_refused(backend: Backend) -> None:
    w = chain_data()[1]
    good = chain()
    with pytest.raises(InvalidArgument, match="'w'"):
        backend.executable(good, backend.weights({}))
    with pytest.raises(InvalidArgument, match="'w'"):
        backend.executable(good, backend.weights({"w": w.reshape(-1)[:-1]}))
    weights = backend.weights({"w": w})
    unknown = {"first": (swiglu(Binding("nowhere"), Binding("h")),)}
    with pytest.raises(InvalidArgument, match="unknown buffer 'nowhere'"):
        backend.executable(replace(good, sequences=unknown), weights)
    beyond = {"first": (swiglu(Binding("x", 256, 8 * TOKENS * F), Binding("h")),)}
    with pytest.raises(InvalidArgument, match="outside"):
        backend.executable(replace(good, sequences=beyond), weights)
    no_params = Program({"x": Buffer("x", 64, "input")}, {})
    with pytest.raises(InvalidArgument, match="params"):
        backend.executable(no_params, weights)


def test_memory_that_is_not_there(backend: Backend) -> None:
    huge = 1 << 60
    buffers = {"params": Buffer("params", 64, "params"), "kc": Buffer("kc", huge, "state")}
    with pytest.raises(OutOfMemory, match=str(huge)):
        backend.executable(Program(buffers, {}), backend.weights({}))


def test_weights_larger_than_the_staging_buffer(backend: Backend) -> None:
    w = np.arange(5 << 20, dtype=np.uint32)  # 20 MiB
    buffers = {"params": Buffer("params", 64, "params"), "w": Buffer("w", w.nbytes, "weight")}
    exe = backend.executable(Program(buffers, {}), backend.weights({"w": w}))
    assert (exe.read("w", w.nbytes).view(np.uint32) == w).all()
