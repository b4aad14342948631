# SPDX-License-Identifier: Apache-2.0
"""onnxruntime on the CPU beside us, with the models of onnx_model.py.

    python -m benchmarks.onnx_peer MODEL.onnx THREADS SPIN

is a process of peer_process.py: it takes a prompt of so many tokens, or makes so many new ones,
each the likeliest, behind the last prompt, which is one of 128 at first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import common, peers
from benchmarks.onnx_model import Missing
from benchmarks.peer_process import LARGE_PAGES, Peer, Process, Stopwatch

SETTINGS = (
    "MatMulNBits in blocks of 32 with float scales (4 bits for q4_0, 8 for q8_0), float32 K and V"
    " in buffers that past and present share, all graph optimisations, one pool of threads as many"
    " as ours"
)
PROMPT = 128
CAPACITY = 256  # tokens for which K and V have room


class Decoder:
    """A model of onnx_model.py in a session of onnxruntime."""

    def __init__(self, model: Path, threads: int, spin: bool, capacity: int = CAPACITY) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
        options.log_severity_level = 3
        providers = ["CPUExecutionProvider"]
        self._session = ort.InferenceSession(str(model), options, providers=providers)
        self._value = ort.OrtValue.ortvalue_from_numpy  # looks at the array, on CPUs
        sizes = {value.name: value.shape for value in self._session.get_inputs()}
        self._past = {
            name: np.zeros([capacity if n == "capacity" else n for n in size], np.float32)
            for name, size in sizes.items()
            if name.startswith("past")
        }
        self._logits = np.zeros(self._session.get_outputs()[0].shape, np.float32)
        self._last, self._total = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._bound: dict[int, tuple[Any, npt.NDArray[np.int64]]] = {}

    def run(self, ids: Sequence[int], at: int) -> npt.NDArray[np.float32]:
        """float32 [vocab] behind tokens from position `at` on; overwritten by the next call."""
        if len(ids) not in self._bound:
            self._bound[len(ids)] = self._bind(len(ids))
        binding, tokens = self._bound[len(ids)]
        tokens[0] = ids
        self._total[0] = at + len(ids)
        self._last[0] = self._total[0] - 1
        self._session.run_with_iobinding(binding)
        return self._logits[0, 0]

    def prompt(self, count: int) -> int:
        """The likeliest token behind a prompt of so many."""
        vocab = self._logits.shape[-1]
        return int(self.run([7 * i % vocab for i in range(count)], 0).argmax())

    def _bind(self, count: int) -> tuple[Any, npt.NDArray[np.int64]]:
        binding, tokens = self._session.io_binding(), np.zeros((1, count), np.int64)
        inputs = {"ids": tokens, "last": self._last, "total": self._total}
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, self._value(array))
        binding.bind_ortvalue_output("logits", self._value(self._logits))
        for name, array in self._past.items():
            value = self._value(array)
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past", "present"), value)
        return binding, tokens


@dataclass(frozen=True, order=True)
class Way:
    """How onnxruntime runs: MatMulNBits' accuracy level (onnx_model.ACCURACIES), and whether its
    threads spin where they wait.
    """

    accuracy: int
    spin: bool

    def __str__(self) -> str:
        return f"accuracy level {self.accuracy}, threads {'spin' if self.spin else 'sleep'}"


class OnnxPeer(Peer[Way]):
    """onnxruntime with one model. Where it does not run the model Missing is raised."""

    def __init__(
        self,
        models: Mapping[int, Path],
        threads: int,
        clock: str,
        program: Sequence[str] = (sys.executable, "-m", "benchmarks.onnx_peer"),
    ) -> None:
        """`models`: the file of each accuracy level, as onnx_model.write gives them."""
        super().__init__(clock, [Way(level, spin) for level in models for spin in (True, False)])
        self._models, self._threads = models, threads
        self._program = program

    def _warm(self, phase: str) -> None:
        """A whole run: the first of each length binds its arrays."""
        self.run(phase)

    def _process(self, way: Way) -> Process:
        model = str(self._models[way.accuracy])
        command = [*self._program, model, str(self._threads), str(int(way.spin))]
        return Process(command, _ended, dict(os.environ) | LARGE_PAGES, common.ROOT)


def _ended(line: str) -> Missing:
    return Missing(f"onnxruntime ended at {line}, see stderr")


def version() -> str:
    """onnxruntime's, which is fetched when it is absent; so is onnx, to write models.

    Raises:
        Missing: they are not to be had here.
    """
    try:
        peers.wheel("onnx")
        return peers.wheel("onnxruntime")
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        raise Missing(f"onnxruntime is not to be had here: {error}") from error


def main(model: str, threads: str, spin: str) -> int:
    """The process: answers until the end of stdin."""
    peers.wheel("onnxruntime")
    decoder = Decoder(Path(model), int(threads), spin == "1")
    prompt, token = PROMPT, decoder.prompt(PROMPT)
    for line in sys.stdin:
        kind, count = line.split()
        with Stopwatch() as watch:
            if kind == "prefill":
                prompt = int(count)
                token = decoder.prompt(prompt)
            for i in range(int(count) if kind == "decode" else 0):
                token = int(decoder.run([token], prompt + i).argmax())
        print(watch.took.wall, watch.took.cpu, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
