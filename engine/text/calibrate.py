# SPDX-License-Identifier: Apache-2.0
"""What a text says of a model: which columns of its matrices matter, and its perplexity.

A part of the text is for the first, the rest for the second, so that nothing is judged by what it
was fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.backends.base import Backend
from engine.errors import InvalidArgument
from engine.lower import lower
from engine.program import Call
from engine.text.compiled import Importance
from engine.text.model import TextModel
from engine.variants import allowed
from kernels import op as contract_of

TEXT = Path(__file__).with_name("calibration.txt")
WINDOW = 256  # tokens that are seen together
LEAST, MOST = 3, 16  # windows of a text
_FITTED = 0.4  # of the windows: what importance is taken of

Windows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Text:
    """Windows of tokens: to fit to, and to judge by."""

    fitted: Windows
    judged: Windows


def windows(model: TextModel, text: str) -> Text:
    """A text in windows of WINDOW tokens, each with the model's first token where it wants one.

    Raises:
        InvalidArgument: the text is too short.
    """
    ids = model.tokenizer.encode(text, bos=False)
    settings = model.tokenizer.settings
    bos = [settings.bos] if settings.add_bos and settings.bos is not None else []
    each = min(WINDOW, int(model.graph.attrs["context"])) - len(bos)
    cut = [[*bos, *ids[at : at + each]] for at in range(0, len(ids) - each + 1, each)][:MOST]
    if len(cut) < LEAST:
        raise InvalidArgument(
            f"The text to calibrate by has {len(ids)} tokens; {LEAST * each} are the least."
        )
    count = max(1, int(_FITTED * len(cut)))
    return Text(cut[:count], cut[count:])


def importance(model: TextModel, cut: Windows) -> Importance:
    """The mean square of what each column of a product is multiplied with, by the product's name in
    the graph. Products of experts are left out.
    """
    backend: Backend = model.backend
    size = len(cut[0])
    program = lower(model.graph, backend.info, size, size, allowed(backend))
    calls = program.sequences["prefill"] + program.sequences.get("rest", ())
    single: dict[str, tuple[Call, ...]] = {str(i): (call,) for i, call in enumerate(calls)}
    exe = backend.executable(replace(program, sequences=single), model.weights)
    names = {w: n.name for n in model.graph.nodes if n.op == "linear" for w in n.weights}
    sums: dict[str, npt.NDArray[np.float64]] = {}
    params = np.zeros(16, np.uint32)
    try:
        for ids in cut:
            params[:3] = len(ids), 0, len(ids) - 1
            exe.write("params", params)
            exe.write("ids", np.asarray(ids, np.uint32))
            means: dict[str, npt.NDArray[np.float64]] = {}  # some products have several calls
            for i, call in enumerate(calls):
                name = names.get(call.bindings[0].buffer) if call.op == "matmul" else None
                if name is not None:
                    k = int(contract_of(call.op).unpack(call.push)["k"])
                    raw: Any = exe.read(call.bindings[1].buffer, 4 * k * len(ids))
                    x = np.ascontiguousarray(raw).view(np.float32).reshape(-1, k)
                    means[name] = np.square(x, dtype=np.float64).mean(axis=0)
                exe.run(str(i))
            for name, mean in means.items():
                sums[name] = sums.get(name, 0) + mean / len(cut)
    finally:
        exe.close()
    return sums


def perplexity(model: TextModel, cut: Windows) -> float:
    """Of the second half of each window."""
    state = model.state(len(cut[0]))
    total, count = 0.0, 0
    try:
        for ids in cut:
            half = len(ids) // 2
            state.common([])
            for at in range(0, half, state.chunk):
                state.run(list(ids[at : min(at + state.chunk, half)]), head=False)
            for at in range(half, len(ids) - 1):
                state.run([ids[at]], head=True, decode=True)
                logits = state.logits().astype(np.float64)
                top = logits.max()
                total += top + math.log(np.exp(logits - top).sum()) - logits[ids[at + 1]]
                count += 1
    finally:
        state.close()
    return math.exp(total / count)
