# SPDX-License-Identifier: Apache-2.0
"""Perplexity of the language engine against llama.cpp: same file, same text, windows of 512 tokens.

    python -m benchmarks.text_quality [--quick] [--json] [--threads N] [--model FILE]
        [--weights TYPE …] [--device gpu]

Rows are named MODEL WEIGHTS perplexity; lower is better, and the ratio is the peer's by ours. The
way of counting is llama-perplexity's: the text is cut into windows of 512 tokens, each begins with
the model's first token where it wants one, and the second half of a window is judged. `decode` rows
feed those tokens one by one, as an answer is written; `prefill` is the same text in the way that a
prompt is read (the last token of each piece has logits, so pieces of one token). `decode kv-q8` has
keys and values in int8, beside a peer whose are halves: what the smaller caches cost.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks import common, peers
from benchmarks.llama_peer import environment
from benchmarks.text_cpu import requantised, smollm2
from engine.text.model import State, TextModel

TEXT = Path(__file__).with_name("data") / "opticks-20k.txt"
WINDOW = 512
QUICK_WINDOWS = 2


def windows(model: TextModel, text: str, most: int) -> list[list[int]]:
    """The text's tokens in whole windows, the first of each replaced as llama-perplexity does."""
    ids = model.tokenizer.encode(text)
    cut = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
    settings = model.tokenizer.settings
    if settings.add_bos and settings.bos is not None:
        cut = [[settings.bos, *window[1:]] for window in cut]
    return cut[:most] if most else cut


def surprise(state: State, window: list[int], decode: bool) -> float:
    """Sum of the negative log chances of the tokens in the second half of a window."""
    half = len(window) // 2
    state.common([])
    for at in range(0, half, state.chunk):
        state.run(window[at : min(at + state.chunk, half)], head=False)
    total = 0.0
    for at in range(half, len(window) - 1):
        state.run(window[at : at + 1], head=True, decode=decode)
        logits = state.logits().astype(np.float64)
        top = logits.max()
        total += top + math.log(np.exp(logits - top).sum()) - logits[window[at + 1]]
    return total


def ours(model: TextModel, text: str, most: int, decode: bool, kv: str = "f16") -> float:
    """Perplexity of a model, with caches of that form."""
    state = model.state(WINDOW, kv)
    cut = windows(model, text, most)
    judged = len(cut) * (WINDOW - 1 - WINDOW // 2)
    try:
        return math.exp(sum(surprise(state, w, decode) for w in cut) / judged)
    finally:
        state.close()


def peer(file: Path, most: int, threads: int) -> float:
    """Perplexity by llama-perplexity."""
    tool = peers.llama_cpp() / "llama-perplexity"
    command = [str(tool), "-m", str(file), "-f", str(TEXT), "-c", str(WINDOW), "-t", str(threads)]
    command += ["-ngl", "0", "--chunks", str(most or -1)]
    env = environment("cpu")  # nothing is timed: it may as well sleep where it waits
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    found = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
    if found is None:
        raise SystemExit("llama-perplexity gave no estimate")
    return float(found[1])


def measure(args: argparse.Namespace) -> list[common.Row]:
    source = Path(args.model) if args.model else smollm2()
    name = source.stem if args.model else "smollm2"
    own = "file" if args.model else "q4_1"
    kinds = args.weights or ([own] if args.quick else [own, "q8_0", "f16"])
    files = {kind: source if kind == own else requantised(source, kind) for kind in kinds}
    most = QUICK_WINDOWS if args.quick else 0
    text = TEXT.read_text(encoding="utf-8")
    backend = common.backend(args)
    rows = []
    for weights, file in files.items():
        theirs = peer(file, most, args.threads)
        model = TextModel.load(file, str(peers.cache() / f"{file.stem}.pvrm"), backend)
        for way in ("decode",) if args.quick else ("decode", "decode kv-q8", "prefill"):
            kv = "q8" if way.endswith("q8") else "f16"
            value = ours(model, text, most, way != "prefill", kv)
            title = f"{name} {weights} perplexity {way}"
            print(f"{title}: {value:.4f}, llama.cpp {theirs:.4f}", file=sys.stderr, flush=True)
            rows.append(common.Row(title, "ppl", value, theirs, "llama.cpp", theirs / value))
        model.close()
    backend.close()
    return rows


def facts() -> dict[str, str]:
    """The peer's version and flags."""
    return {
        "peer": f"llama-cpp-python {peers.LLAMA_VERSION}, {' '.join(peers.LLAMA_FLAGS)}",
        "text": f"{TEXT.name}, windows of {WINDOW}",
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a GGUF file instead of SmolLM2")
    parser.add_argument("--weights", nargs="+", help="of these: q4_1 or file (as it is), q8_0, f16")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")


if __name__ == "__main__":
    sys.exit(common.main(__doc__.splitlines()[0], measure, options, facts))
