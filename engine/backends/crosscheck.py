# SPDX-License-Identifier: Apache-2.0
"""Now and then a slice is run in parts, and one of its kernel calls computed again with numpy; so
is each call with constants that were not seen before, that is each size, at its first run.

A driver's wrong numbers may depend on sizes or on what ran before, which no self-test sees. The
call's inputs are copied before it, its outputs after it, within the slice itself, and the slice's
results are not given out before the comparison. Calls that are not sampled can be wrong.

All that is time which somebody else waits for. So where slices have a limit, a sample is a piece
that costs at most a part of it, by what the kernel's last ones cost; and what it costs is no part
of what the slice took (engine.pace.clock).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

import kernels
from engine.backends.base import (
    NOTHING,
    NOWHERE,
    Adopted,
    Array,
    Backend,
    Executable,
    Into,
    Lent,
    RunStats,
    WeightSet,
)
from engine.backends.host import as_bytes
from engine.backends.selftest import Quarantined
from engine.pace import ASIDE, LIMIT
from engine.program import Binding, Call, Program
from kernels import pieces
from kernels.contract import PARAM_WORDS

MOST = 16 << 20  # bytes that may be copied for a check
PART, MOST_S = 0.5, 2.5e-3  # of a slice's limit, and seconds: what a check may take
UNIT_S = 1e-9  # a unit of a piece's work takes about so long, where nothing is known
MARGIN, KNOWN = 0.8, 3  # of the bound is aimed at; checks of a kernel after which it is known
DEAR, RAREST = 2.0, 16  # times the bound: what costs more is as much rarer, down to one of so many


class Suspect(Quarantined):
    """A call of the slice that just ran gave something else than its reference: nothing that the
    slice wrote is to be used, what was computed with the `kernel` before may be wrong too.
    """

    def __init__(self, device: str, kernel: str, reason: str) -> None:
        super().__init__(f"{device} cannot be trusted with {kernel} any more ({reason})")
        self.kernel = kernel
        self.reason = reason


class Checkable(Executable, Protocol):
    """An executable whose slices can be run in parts."""

    def run_apart(
        self,
        sequences: Sequence[str],
        apart: Sequence[int],
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> RunStats: ...


class Doubtable(Backend, Protocol):
    """A backend that can put a variant aside."""

    def quarantine(self, op: str, variant: str, wrong: str) -> None: ...


class Costs:
    """What checks of each kernel (operation.variant) cost, and how much work one may be."""

    def __init__(self) -> None:
        self._units: dict[str, deque[float]] = {}  # seconds of a unit of work, of the last ones

    def most(self, name: str, together: int = 1) -> float:
        """Units of work of a check, `together`: of so many in one slice; any, where slices have no
        limit.
        """
        if not LIMIT.slice_s:
            return math.inf
        bound = min(PART * LIMIT.slice_s, MOST_S) / together
        units = sorted(self._units.get(name, (UNIT_S,)))
        return MARGIN * bound / units[(len(units) - 1) // 2]  # one that was held up counts for none

    def chance(self, name: str, work: float) -> float:
        """How often a check that is at least so much work is to be done, 0..1."""
        known = len(self._units.get(name, ())) == KNOWN
        dear = work / self.most(name) / DEAR
        return max(1 / dear, 1 / RAREST) if known and dear > 1 else 1.0

    def took(self, name: str, work: float, seconds: float) -> None:
        """A check was so much work and took so long."""
        self._units.setdefault(name, deque(maxlen=KNOWN)).append(seconds / max(work, 1.0))


class CheckedWeights:
    """Weights, with the host's copy (views of a file, mostly): reading them back would be slow."""

    def __init__(self, inner: WeightSet, blobs: Mapping[str, Array]) -> None:
        self.inner = inner
        self.blobs = {name: as_bytes(blob) for name, blob in blobs.items()}

    def nbytes(self) -> int:
        return self.inner.nbytes()

    def close(self) -> None:
        self.blobs = {}
        self.inner.close()


class CheckedBackend:
    """A backend of which a share `rate` (0..1) of the slices is checked in one call each, and each
    kernel at each size once. Nothing is checked with rate 0.

    Its counters have `checks`, `checks_failed` and `check_bytes` (read for them, and not counted
    in `bytes_read_back`) beside the backend's own.
    """

    def __init__(
        self, inner: Doubtable, rate: float, rng: np.random.Generator | None = None
    ) -> None:
        self.inner = inner
        self.info = inner.info
        self.rate = rate
        self.rng = rng or np.random.default_rng()
        self.checks = self.failed = self.copied = 0
        self.costs = Costs()
        self.seen: set[tuple[str, str, bytes]] = set()  # operation, variant, push constants
        # Called with True before a slice with many checks, which takes longer, and False after it.
        self.announce: Callable[[bool], None] = lambda on: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def weights(self, blobs: Mapping[str, Array]) -> CheckedWeights:
        return CheckedWeights(self.inner.weights(blobs), blobs)

    def executable(self, program: Program, weights: Any, lent: Lent = NOTHING) -> CheckedExecutable:
        checked = isinstance(weights, CheckedWeights)
        inner_lent = {name: (e._inner, buffer) for name, (e, buffer) in lent.items()}
        made: Any = self.inner.executable(
            program, weights.inner if checked else weights, inner_lent
        )
        return CheckedExecutable(self, program, made, weights.blobs if checked else {})

    def adopt(self, memory: Array, fd: int = -1) -> Adopted | None:
        return self.inner.adopt(memory, fd)

    def counters(self) -> dict[str, int]:
        counters = dict(self.inner.counters())
        counters["bytes_read_back"] -= self.copied
        own = {"checks": self.checks, "checks_failed": self.failed, "check_bytes": self.copied}
        return {**counters, **own}

    def close(self) -> None:
        self.inner.close()


class CheckedExecutable:
    """An executable, some of whose slices are checked. `passed` counts for each kernel
    (`operation.variant`) how often it was found right; `kernels` are all that the program uses.
    """

    def __init__(
        self, backend: CheckedBackend, program: Program, inner: Any, blobs: Mapping[str, Array]
    ) -> None:
        self.program = program
        self.passed: dict[str, int] = {}
        self.kernels = frozenset(
            f"{c.op}.{c.variant}" for calls in program.sequences.values() for c in calls
        )
        self._backend = backend
        self._inner: Checkable = inner
        self._blobs = blobs
        self._known: set[tuple[str, ...]] = set()  # slices without a call of a size not seen
        self._turns: dict[str, int] = {}  # of each kernel, also those in which nothing was checked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, buffer: str, data: Array | bytes, offset: int = 0) -> None:
        self._inner.write(buffer, data, offset)

    def read(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        return self._inner.read(buffer, nbytes, offset)

    def look(self, buffer: str, nbytes: int, offset: int = 0) -> Array:
        return self._inner.look(buffer, nbytes, offset)

    def fetch(self, into: Into) -> None:
        self._inner.fetch(into)

    def close(self) -> None:
        self._blobs = {}
        self._inner.close()

    def run(self, *sequences: str, into: Into = NOWHERE) -> RunStats:
        """As Executable.run; what a check takes is in ASIDE and not in the result.

        Raises:
            Suspect: the slice was checked and is wrong. Its kernel is quarantined.
        """
        backend = self._backend
        if backend.rate <= 0:
            return self._inner.run(*sequences, into=into)
        if any(name not in self.program.sequences for name in sequences):
            return self._inner.run(*sequences)  # which has the words for it
        sampled = backend.rng.random() < backend.rate
        if not sampled and sequences in self._known:
            return self._inner.run(*sequences, into=into)
        calls = [c for name in sequences for c in self.program.sequences[name]]
        new: dict[tuple[str, str, bytes], int] = {}
        for i, c in enumerate(calls):
            if (c.op, c.variant, c.push) not in backend.seen:
                new.setdefault((c.op, c.variant, c.push), i)
        self._known.add(sequences)
        apart = sorted(new.values()) or ([self._pick(calls)] if sampled and calls else [])
        if not apart:
            return self._inner.run(*sequences, into=into)
        # All new ones together are bounded only where somebody's work would come too late by them.
        bounded = not new or LIMIT.streams > 0
        together = len(apart) if bounded else 0
        checks = {i: _Check(self, calls[i], together, not new) for i in apart}
        if new:
            backend.announce(True)
        aside = ASIDE.seconds
        stats = self._inner.run_apart(
            sequences, apart, lambda i: checks[i].before(), lambda i: checks[i].after()
        )
        stats = replace(stats, wall_s=max(0.0, stats.wall_s - (ASIDE.seconds - aside)))
        backend.seen.update(new)
        self._judge(checks.values())
        if new:
            backend.announce(False)
        self._inner.fetch(into)
        return stats

    def _judge(self, checks: Iterable[_Check]) -> None:
        """Notes what passed and quarantines the rest.

        Raises:
            Suspect: for the first that is wrong.
        """
        backend, first = self._backend, ("", "")
        for check in checks:
            backend.copied += check.copied
            wrong, call, name = check.wrong(), check.call, check.name
            if wrong is None:
                continue
            backend.checks += 1
            backend.costs.took(name, check.work, check.seconds)
            if not wrong:
                self.passed[name] = self.passed.get(name, 0) + 1
                continue
            backend.failed += 1
            if first[0] != name:
                backend.inner.quarantine(call.op, call.variant, wrong)
            first = first if first[0] else (name, wrong)
        if first[0]:  # made here: one that its own traceback's frames know would keep them all
            raise Suspect(backend.info.name, *first)

    def _pick(self, calls: Sequence[Call]) -> int:
        """A call of the kernel that had the fewest turns, so that all have theirs."""
        rng = self._backend.rng
        counts = {}
        for call in calls:
            name = f"{call.op}.{call.variant}"
            counts[name] = self._turns.get(name, 0)
        least = min(counts.values())
        names = [name for name, n in counts.items() if n == least]
        name = names[int(rng.integers(len(names)))]
        self._turns[name] = least + 1
        numbers = [i for i, c in enumerate(calls) if f"{c.op}.{c.variant}" == name]
        return numbers[int(rng.integers(len(numbers)))]

    def range(self, binding: Binding) -> tuple[int, int]:
        """First byte and size of a binding."""
        size = self.program.buffers[binding.buffer].nbytes - binding.offset
        return binding.offset, size if binding.nbytes is None else binding.nbytes


class _Check:
    """One call, before and after. together: how many are bounded together, 0: it is not; rare: one
    that takes too long may be left out.
    """

    def __init__(self, exe: CheckedExecutable, call: Call, together: int, rare: bool) -> None:
        self._exe = exe
        self.call = call
        self.name = f"{call.op}.{call.variant}"
        self._together, self._rare = together, rare
        self._contract = kernels.op(call.op)
        self._exact = self._contract.variant(call.variant).baseline
        self._push = self._contract.unpack(call.push)
        names = [b.name for b in self._contract.bindings]
        self._bound = dict(zip(names, call.bindings, strict=True))
        self._outputs = frozenset(b.name for b in self._contract.bindings if "w" in b.access)
        self._piece: pieces.Piece | None = None
        self._inputs: dict[str, Array] = {}
        self._results: dict[str, Array] = {}
        self.copied = 0
        self.seconds = 0.0  # that it took

    @property
    def work(self) -> float:
        """Of its piece."""
        return self._piece.work if self._piece is not None else 0.0

    def _read(self, name: str, at: int, nbytes: int) -> Array:
        binding = self._bound[name]
        first, size = self._exe.range(binding)
        there = max(0, min(nbytes, size - at))
        blob = self._exe._blobs.get(binding.buffer)
        if blob is not None:
            found = blob[first + at : first + at + there]
        else:
            found = self._exe.read(binding.buffer, there, first + at)
            self.copied += there
        return found if there == nbytes else np.pad(found, (0, nbytes - there))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds += took
            ASIDE.add(took)

    def before(self) -> None:
        """Chooses the piece and copies what it reads."""
        with self._aside():
            self._before()

    def _before(self) -> None:
        words = self._exe.read("params", 4 * PARAM_WORDS, self.call.params).view(np.uint32)
        self.copied += 4 * PARAM_WORDS
        sizes = {name: self._exe.range(b)[1] for name, b in self._bound.items()}
        backend = self._exe._backend
        most = backend.costs.most(self.name, self._together) if self._together else math.inf
        draw = pieces.Draw(backend.rng, most)
        piece = pieces.piece(self._contract, self._push, words, sizes, self._read, draw)
        if piece is None or piece.nbytes() > MOST:
            return
        # What cannot be small enough comes as much more rarely, but what is new in any case.
        if not self._rare or backend.rng.random() < backend.costs.chance(self.name, piece.work):
            self._piece = piece
            self._inputs = piece.copy(self._read, frozenset(self._bound))

    def after(self) -> None:
        """Copies what it wrote."""
        if self._piece is not None:
            with self._aside():
                self._results = self._piece.copy(self._read, self._outputs)

    def wrong(self) -> str | None:
        """What is wrong with the call, "" if nothing, None if it was not checked."""
        with self._aside():
            return self._wrong()

    def _wrong(self) -> str | None:
        piece = self._piece
        if piece is None:
            return None
        with np.errstate(all="ignore"):  # what a model's weights lead to is not judged here
            self._contract.reference(piece.params, self._inputs, piece.push)
        for name, look in piece.shows.items():
            got, want = look(self._results[name]), look(self._inputs[name])
            share = pieces.wrong(got, want, self._exact)
            if share:
                return f"while serving {share:.1%} of a piece of {name} was wrong"
        return ""
