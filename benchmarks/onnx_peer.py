# SPDX-License-Identifier: Apache-2.0
"""onnxruntime on the CPU beside us, with the models of onnx_model.py: a process for each of its
ways that keeps the model loaded, so that runs can be interleaved without a load between them, and
that tells its own CPU time.

    python -m benchmarks.onnx_peer MODEL.onnx THREADS SPIN

is such a process. To each line `prefill N` or `decode N` on stdin it answers with seconds by the
clock on the wall and on CPUs: of a prompt of so many tokens, or of so many new ones, each the
likeliest, behind the last prompt, which is one of 128 at first.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import common, peers
from benchmarks.llama_peer import Stopwatch, Took
from benchmarks.onnx_model import Missing

SETTINGS = (
    "MatMulNBits in blocks of 32 with float scales (4 bits for q4_0, 8 for q8_0), float32 K and V"
    " in buffers that past and present share, all graph optimisations, one pool of threads as many"
    " as ours"
)
PROMPT = 128
CAPACITY = 256  # tokens for which K and V have room
_PROBE = {"decode": 8, "prefill": 64}  # tokens by which ways are compared


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


class _Process:
    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=common.ROOT)

    def run(self, kind: str, count: int) -> Took:
        """One run. Raises Missing where the program ended."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(f"{kind} {count}\n")
            self._child.stdin.flush()
            return Took(*map(float, self._child.stdout.readline().split()))
        except (OSError, TypeError, ValueError):
            raise Missing(f"onnxruntime ended at {kind} {count}, see stderr") from None

    def close(self) -> None:
        try:
            self._child.communicate()
        except OSError:  # it ended before it read all
            self._child.wait()


class OnnxPeer:
    """onnxruntime with one model. Each phase (`decode32`, `prefill128`, …) is run in the way that
    was the fastest at a short one of its kind, the model loaded once for a way that is in use.
    """

    def __init__(
        self,
        models: Mapping[int, Path],
        threads: int,
        clock: str,
        program: Sequence[str] = (sys.executable, "-m", "benchmarks.onnx_peer"),
    ) -> None:
        """`models`: the file of each accuracy level, as onnx_model.write gives them."""
        self._models, self._threads, self._clock = models, threads, clock
        self._program = program
        self._running: dict[Way, _Process] = {}
        self.best: dict[str, Way] = {}

    def __enter__(self) -> OnnxPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            process.close()

    def choose(self, phases: Sequence[str]) -> None:
        """Finds the best way for each phase, and loads it.

        Raises:
            Missing: this onnxruntime does not run the model.
        """
        found: dict[str, list[tuple[float, Way]]] = {_kind(phase): [] for phase in phases}
        for way in [Way(level, spin) for level in self._models for spin in (True, False)]:
            process = self._process(way)
            try:
                for kind, times in found.items():
                    process.run(kind, 4)  # pages, threads, caches
                    took = [process.run(kind, _PROBE[kind]).by(self._clock) for _ in range(2)]
                    times.append((min(took), way))
            finally:
                process.close()
        self.best |= {phase: min(found[_kind(phase)])[1] for phase in phases}
        for phase, way in self.best.items():
            if way not in self._running:
                self._running[way] = self._process(way)
            self.run(phase)

    def run(self, phase: str) -> Took:
        """One run of a phase that was chosen for."""
        kind = _kind(phase)
        return self._running[self.best[phase]].run(kind, int(phase.removeprefix(kind)))

    def _process(self, way: Way) -> _Process:
        model = self._models[way.accuracy]
        return _Process([*self._program, str(model), str(self._threads), str(int(way.spin))])


def _kind(phase: str) -> str:
    return phase.rstrip("0123456789")


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
