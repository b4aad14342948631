# SPDX-License-Identifier: Apache-2.0
"""A model without the daemon, for developers: what the passes did, or an answer and its speed.

python -m engine.text MODEL.gguf --prompt "Hello" [--chat] [--backend cpu|vulkan|null] [-n 64]
python -m engine.text MODEL.gguf --explain
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from engine.backends.base import Backend
from engine.errors import PvrError
from engine.text.compiled import explain_file
from engine.text.generate import Generation
from engine.text.model import TextModel
from engine.text.request import End, Request, Start


def _backend(name: str, threads: int) -> Backend:
    if name == "vulkan":
        from engine.backends.vulkan import VulkanBackend

        return VulkanBackend(allow_software=True)
    if name == "null":
        from engine.backends.null import NullBackend

        return NullBackend(reference=True)
    from engine.backends.cpu import CpuBackend

    return CpuBackend(threads)


def _answer(model: TextModel, args: argparse.Namespace) -> None:
    settings: dict[str, Any] = {
        "temperature": args.temp,
        "max_tokens": args.n,
        "seed": args.seed,
    }
    if args.chat:
        request = Request(
            "chat", messages=[{"role": "user", "content": args.prompt}], settings=settings
        )
    else:
        request = Request("generate", prompt=args.prompt, settings=settings)
    state = model.state(args.context)
    generation = Generation(state, request)
    while not generation.finished:
        for event in generation.step():
            if not isinstance(event, Start):
                print(event.text, end="", flush=True)
            if isinstance(event, End):
                _speeds(event)
    state.close()


def _speeds(end: End) -> None:
    s = end.stats
    line: list[str] = [end.reason]
    for phase in ("prefill", "decode"):
        tokens, seconds = s[f"{phase}_tokens"], max(s[f"{phase}_s"], 1e-9)
        line.append(f"{phase} {tokens:.0f} tokens, {tokens / seconds:.1f}/s")
    print(f"\n[{'; '.join(line)}]")


def main(argv: list[str] | None = None) -> int:
    """The command line above; 0, or 1 after a sentence on standard error."""
    parser = argparse.ArgumentParser(
        prog="engine.text", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, a folder or a compiled .pvrm")
    parser.add_argument("--prompt", default="Hello")
    parser.add_argument("--chat", action="store_true", help="use the model's chat template")
    parser.add_argument("--backend", choices=("cpu", "vulkan", "null"), default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", default="", help="where the compiled model is kept")
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a prompt in one slice")
    parser.add_argument("-n", type=int, default=64, help="most tokens of the answer")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--explain", action="store_true", help="what the passes do to the model")
    args = parser.parse_args(argv)
    try:
        if args.explain:
            fd = os.open(args.model, os.O_RDONLY | os.O_CLOEXEC)
            try:
                print(explain_file(fd))
            finally:
                os.close(fd)
            return 0
        backend = _backend(args.backend, args.threads)
        model = TextModel.load(args.model, args.cache, backend, chunk=args.chunk)
        print(f"[{backend.info.name}: {model.info}]", file=sys.stderr)
        _answer(model, args)
        model.close()
        backend.close()
    except (PvrError, OSError) as e:
        print(f"engine.text: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
