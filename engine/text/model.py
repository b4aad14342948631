# SPDX-License-Identifier: Apache-2.0
"""A text model on a device: compiled once into a .pvrm, its weights shared by all sessions, a State
for each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine import memory, pvrm
from engine.backends.base import Backend, Executable
from engine.errors import BadModel, ContextFull, InvalidArgument, OutOfMemory
from engine.lower import TAIL_PARAMS
from engine.lower_batch import NoBatch
from engine.pace import Fit, device_clock
from engine.program import Program
from engine.record import recorded
from engine.text import short
from engine.text.compiled import compiled_model, described, info
from engine.text.fit import CHUNK, fitting
from engine.text.fit import CONTEXT as DEFAULT_CONTEXT
from engine.text.guess import Price
from engine.text.rows import Rows
from engine.text.sampler import RECORD_BYTES
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Data, TextTokenizer
from engine.variants import allowed
from kernels.advance.op import MOST, STRIDE

Progress = Callable[[float], None]

MATRIX_CHUNK = 512  # where the device has units for matrices, which want many at a time
SOFTWARE_CHUNK = 32
LEAST = 16  # tokens of a prompt: fewer take about as long where the weights are what is read
OVER = 1.5  # so much longer than those may a slice take, where they take too long already


class State:
    """What a session has on the device: its KV cache, scratch and recordings. `tokens` are the ids
    in the cache.
    """

    def __init__(self, model: TextModel, program: Program, executable: Executable) -> None:
        self.model = model
        self.context = int(program.meta["context"])
        self.chunk = int(program.meta["chunk"])
        self.kv = str(program.meta["kv"])
        self.tokens: list[int] = []
        self.executable = executable
        self.caches = [b.name for b in program.buffers.values() if b.kind == "state"]
        self._params = np.zeros(program.buffers["params"].nbytes // 4, np.uint32)
        self._tail = "tail" in program.sequences
        # Most tokens of `run_ahead`.
        self.ahead = model.ahead if "advance" in program.sequences else 1
        self._ahead = "ahead" in program.sequences
        self.price = Price()
        self._rows: Rows | None = None
        self._no_rows = False

    @property
    def piece(self) -> int:
        """How many tokens of a prompt the next slice should have, at most `chunk`."""
        return self.model.fit.most(self.chunk)

    def common(self, ids: list[int]) -> int:
        """How many of these ids are in the cache already; what follows them in the cache is given
        up.
        """
        n = min(len(self.tokens), len(ids))
        if self.tokens[:n] != ids[:n]:
            n = next(i for i in range(n) if self.tokens[i] != ids[i])
        del self.tokens[n:]
        return n

    def run(self, ids: list[int], head: bool, decode: bool = False, hidden: bool = False) -> None:
        """One slice: feeds 1 to `chunk` tokens after those in the cache, with `head` the logits of
        the last as well. `decode` computes one token in its own, faster way, whose last digits are
        not those of a prefill. `hidden`: so that `hidden` can be asked, without logits.

        Raises:
            DeviceLost: the device is gone; the state is of no use any more.
            ContextFull: they do not fit.
        """
        pos = len(self.tokens)
        if not 1 <= len(ids) <= self.chunk:
            raise ValueError(f"{len(ids)} tokens in a slice of {self.chunk}")
        if pos + len(ids) > self.context:
            raise ContextFull(f"The context of {self.context} tokens is full.")
        last = len(ids) - 1
        self._params[:3] = len(ids), pos, 0 if self._tail else last
        at = TAIL_PARAMS // 4
        self._params[at : at + 3] = 1, pos + last, 0
        self.executable.write("params", self._params)
        self.executable.write("ids", np.asarray(ids, np.uint32))
        sequences = ["decode" if decode and len(ids) == 1 else "prefill"]
        if self._tail and sequences[0] == "prefill" and (head or hidden):
            sequences.append("rest" if hidden else "tail")
        if head:
            sequences.append("head")
        began = device_clock()
        self.executable.run(*sequences)
        if sequences[0] == "prefill":
            self.model.fit.took(len(ids), device_clock() - began)
        self.tokens.extend(ids)

    def run_ahead(self, token: int, steps: int, others: bool = True) -> list[npt.NDArray[np.uint8]]:
        """One slice of 1 to `ahead` tokens, or fewer when something urgent came: feeds `token`,
        then each time the likeliest that follows. The record of `topk` after each, without `others`
        but the likeliest where that is quicker; all tokens that were fed are in the cache then, as
        if `run` had been given them one by one.

        Raises:
            As run.
        """
        pos = len(self.tokens)
        if not 1 <= steps <= self.ahead:
            raise ValueError(f"{steps} tokens in a slice of {self.ahead}")
        if pos + steps > self.context:
            raise ContextFull(f"The context of {self.context} tokens is full.")
        self._params[:4] = 1, pos, 0, 0
        self.executable.write("params", self._params)
        self.executable.write("ids", np.asarray([token], np.uint32))
        whole = self._ahead and not others
        sequences = ("ahead",) if whole else ("decode", "head", "advance")
        steps = self.executable.run(*sequences * steps).done or steps
        every = self.executable.read("records", 4 * STRIDE * steps)
        records = [every[4 * STRIDE * i :][:RECORD_BYTES] for i in range(steps)]
        self.tokens.append(token)
        self.tokens += [int(record[:4].view(np.uint32)[0]) for record in records[:-1]]
        return records

    @property
    def rows(self) -> Rows | None:
        """What computes several tokens with the logits after each; None where there is no memory
        for it, or the model has none.
        """
        if self._rows is None and not self._no_rows:
            try:
                self._rows = Rows(self)
            except (NoBatch, OutOfMemory):
                self._no_rows = True
        return self._rows

    def best(self) -> npt.NDArray[np.uint8]:
        """The record of `topk` after a slice with head."""
        return self.executable.read("topk", RECORD_BYTES)

    def logits(self) -> npt.NDArray[np.float32]:
        """All logits after a slice with head."""
        raw = self.executable.read("logits", self.model.vocab * 4)
        return np.ascontiguousarray(raw).view(np.float32)

    def hidden(self, count: int) -> npt.NDArray[np.float32]:
        """What the last slice, run with `hidden`, left of its first `count` tokens behind the last
        layer and the final norm: f32 [count, width].
        """
        width = self.model.width
        raw = self.executable.read("x", 4 * width * count)
        x = np.ascontiguousarray(raw).view(np.float32).reshape(count, width)
        return self.model.normalised(x)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self.executable.close()


_SHORT = "tokenizer/short/"


def _tokenizer(meta: dict[str, Any], compiled: pvrm.Pvrm, vocab: int) -> TextTokenizer:
    try:
        tables = None
        if compiled.whole and f"{_SHORT}frame" in compiled.entries:  # ours: no need to try it all
            tables = short.read(lambda name: compiled.blob(_SHORT + name))
        made = TextTokenizer(
            Data(
                meta["tokenizer"],
                compiled.blob("tokenizer/library").tobytes(),
                compiled.blob("tokenizer/pieces"),
                np.ascontiguousarray(compiled.blob("tokenizer/ends")).view(np.uint32),
                tables,
            )
        )
        known = made.settings
        named = [*known.specials, *known.user_defined]
        ids = [*known.ends, *(i for _, i in named)]
        ids += [i for i in (known.bos, known.eos) if i is not None]
        if any(type(i) is not int or not 0 <= i < vocab for i in ids) or made.vocab > vocab:
            raise ValueError("a token that is not there")
        if any(not isinstance(text, str) for text, _ in named):
            raise TypeError("a token without a text")
        return made
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
        raise BadModel("The compiled model's tokenizer is damaged.") from None


class TextModel:
    """A model, loaded: weights on the device, tokenizer and template ready."""

    def __init__(
        self,
        compiled: pvrm.Pvrm,
        backend: Backend,
        chunk: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """Checks the weights of a compiled model and places them on a device.

        Raises:
            BadModel, OutOfMemory
        """
        meta, self.graph = compiled.once(described)
        self.info = info(meta, self.graph)
        self.vocab = int(self.graph.attrs["vocab"])
        self.chunk = chunk or _chunk(backend)
        waits = backend.info.kind == "gpu" and not backend.info.software
        self.ahead = MOST if waits else 1  # most tokens of a slice that decodes
        # Answers may guess what they say next, where that cannot change a digit.
        halves = any(w.format == "f16" for w in self.graph.weights.values() if w.layout != "rows")
        self.guesses = backend.info.kind == "cpu" and not halves
        self.fit = Fit(LEAST, OVER)  # of a prompt's tokens
        self.tokenizer = _tokenizer(meta, compiled, self.vocab)
        settings = self.tokenizer.settings
        norm = next(n for n in self.graph.nodes if n.op == "rms_norm" and n.attrs["last"])
        self.width = norm.int("k")
        self._final_norm = compiled.blob(norm.weights[0]), float(norm.attrs["eps"])
        self.template = ChatTemplate(
            meta["template"],
            self.tokenizer.special(settings.bos),
            self.tokenizer.special(settings.eos),
            self.tokenizer.special_texts,
        )
        memory.admit({"weights": self.info["nbytes"]})
        self.backend = backend
        blobs: dict[str, npt.NDArray[np.uint8]] = {}
        for name in self.graph.weights:
            blobs[name] = compiled.blob(name)
            if progress:
                progress(len(blobs) / len(self.graph.weights))
        compiled.note_whole()
        self.weights = backend.weights(blobs)

    @classmethod
    def load(
        cls,
        source: int | str | os.PathLike[str],
        cache: str,
        backend: Backend,
        progress: Progress | None = None,
        *,
        chunk: int = 0,
        force: bool = False,
        narrow: bool = False,
    ) -> TextModel:
        """Loads a source (path or descriptor, which stays the caller's) by way of the compiled
        model `cache`.

        It is compiled when the cache lacks it, is damaged or was made from another file, or with
        `force`; cache "" or one that cannot be written: into memory (`info["uncached"]` says why).
        `progress` gets 0..1. `chunk`: most tokens of a prompt in one slice, 0 for a default.
        `narrow`: with 4-bit weights.

        Raises:
            BadModel, UnsupportedModel, OutOfMemory
            InvalidArgument: the path cannot be opened.
        """
        if not isinstance(source, int):
            try:
                fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as e:
                raise InvalidArgument(
                    f"{Path(source).name} cannot be opened: {e.strerror}."
                ) from None
            try:
                return cls.load(
                    fd, cache, backend, progress, chunk=chunk, force=force, narrow=narrow
                )
            finally:
                os.close(fd)
        tell = progress or (lambda _: None)
        done = 0.0  # what compiling has reached; it is nothing when the cache has the model

        def compiling(value: float) -> None:
            nonlocal done
            done = 0.9 * value
            tell(done)

        compiled, reason = compiled_model(source, cache, compiling, force, narrow)
        model = cls(compiled, backend, chunk, lambda v: tell(done + (1 - done) * v))
        if reason:
            model.info["uncached"] = reason
        return model

    def state(self, context: int = 0, kv: str = "f16") -> State:
        """Room for one session of `context` tokens (0: the default, or what the model can do), in
        caches of the form `kv` (kernels.kv.FORMATS).

        Raises:
            InvalidArgument: more than the model can do.
            OutOfMemory: with figures.
        """
        most = int(self.graph.attrs["context"])
        context = context or min(most, DEFAULT_CONTEXT)
        if not 1 <= context <= most:
            raise InvalidArgument(f"The model has a context of 1 to {most} tokens, not {context}.")
        chunk = min(self.chunk, context)
        program, executable = recorded(
            self.backend, lambda: self._admitted(context, chunk, kv), self.weights
        )
        return State(self, program, executable)

    def _admitted(self, context: int, chunk: int, kv: str) -> Program:
        """The program, if there is memory for its state.

        Raises:
            OutOfMemory: with figures.
        """
        program = fitting(self.graph, self.backend.info, context, chunk, allowed(self.backend), kv)
        sizes = {"state": 0, "scratch": 0}
        for buffer in program.buffers.values():
            if buffer.kind != "weight":
                sizes["state" if buffer.kind == "state" else "scratch"] += buffer.nbytes
        memory.admit({"KV cache": sizes["state"], "work area": sizes["scratch"]})
        return program

    def normalised(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The final norm of rows of hidden states."""
        blob, eps = self._final_norm
        weight = np.ascontiguousarray(blob).view(np.float32)[: self.width]
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean + eps) * weight, np.float32)

    def count(self, text: str) -> int:
        """Tokens of a plain text."""
        return len(self.tokenizer.encode(text, bos=False))

    def close(self) -> None:
        """Gives the weights back; its states have to be closed before."""
        self.weights.close()


def _chunk(backend: Backend) -> int:
    """Tokens of a prompt in one slice, unless others are asked for."""
    if backend.info.kind != "cpu" and backend.info.software:  # a CPU in disguise, or numpy
        return SOFTWARE_CHUNK
    return MATRIX_CHUNK if "coopmat" in backend.info.features else CHUNK
