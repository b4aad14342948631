# SPDX-License-Identifier: Apache-2.0
"""Fuzzes one reader: python -m tests.fuzz TARGET [--minutes N | --seconds N] [--seed N]

With atheris (PyPI; libFuzzer guided by the coverage of pvrd's and the engine's Python) where it is
installed, else by chance alone. Inputs are the seeds of the target, what was found before
(tests/fuzz/found) and what these become. A finding is written to build/fuzz/TARGET-… and ends the
run with its traceback and exit status 1 or more; to keep it, move it to tests/fuzz/found.

Targets that run kernels (pvrm_text, pvrm_net, pvrm_video) find more with kernels that are built
with sanitizers: tools/sanitize.py says how.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS  # imports what it reads with later, under instrumentation

ROOT = Path(__file__).resolve().parents[2]
FOUND = Path(__file__).with_name("found")
FINDINGS = ROOT / "build/fuzz"
SLOW_S = 20  # an input may take so long; the machine may be busy
MEMORY = 3 << 30  # bytes of address space


def guided(name: str, seconds: float, seed: int, corpus: Path) -> None:
    """By atheris, with an empty folder for the corpus; ends the process without Python's clearing
    up.
    """
    import atheris

    with atheris.instrument_imports(include=["pvrd", "engine"]):
        target = TARGETS[name]
        seeds = target.seeds()
        for data in seeds:
            target.run(data)  # imports what it needs, under instrumentation
    kept = [path.read_bytes() for path in sorted(FOUND.glob(f"{name}-*"))]
    for data in [*seeds, *kept]:
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    FINDINGS.mkdir(parents=True, exist_ok=True)
    trying = os.open(FINDINGS / f"{name}-trying", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)

    def run(data: bytes) -> None:
        os.ftruncate(trying, os.pwrite(trying, data, 0))  # what a crash of the stack leaves
        target.run(data)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        draw = random.Random(number)
        if draw.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return mutated(data, number, seeds)[:most]

    longest = max(map(len, seeds))
    arguments = [
        sys.argv[0], str(corpus), f"-artifact_prefix={FINDINGS}/{name}-", f"-timeout={SLOW_S}",
        f"-max_total_time={int(seconds)}", f"-max_len={2 * longest + 4096}", f"-seed={seed}",
        "-rss_limit_mb=3072", "-print_final_stats=1", "-verbosity=0",
    ]  # fmt: skip
    atheris.Setup(arguments, run, custom_mutator=mutate)
    atheris.Fuzz()


def by_chance(name: str, seconds: float, seed: int) -> int:
    """Without a guide; the number of tries."""
    target = TARGETS[name]
    seeds = target.seeds()
    draw = random.Random(seed)
    end, tries = time.monotonic() + seconds, 0
    FINDINGS.mkdir(parents=True, exist_ok=True)
    trying = FINDINGS / f"{name}-trying-{os.getpid()}"
    while time.monotonic() < end:
        number = draw.getrandbits(32)
        data = mutated(seeds[number % len(seeds)], number, seeds)
        trying.write_bytes(data)  # a crash leaves it
        signal.alarm(SLOW_S)
        try:
            target.run(data)
        except BaseException:
            kept = FINDINGS / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}"
            trying.rename(kept)
            print(f"a finding: {kept}", file=sys.stderr)
            raise
        signal.alarm(0)
        tries += 1
    trying.unlink(missing_ok=True)
    return tries


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzzes one reader.")
    parser.add_argument("target", choices=sorted(TARGETS), metavar="TARGET",
                        help=", ".join(sorted(TARGETS)))  # fmt: skip
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)  # for the child below
    args = parser.parse_args()
    seconds = args.seconds or 60 * args.minutes
    if args.plain or importlib.util.find_spec("atheris") is None:
        if "asan" not in os.environ.get("LD_PRELOAD", ""):  # whose shadow is an address space
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        print("atheris is not installed or not wanted: no coverage guides this run", flush=True)
        tries: Any = by_chance(args.target, seconds, args.seed)
        print(f"{args.target}: {tries} inputs in {seconds:g} s, seed {args.seed}, nothing found")
        return 0
    if args.corpus:
        guided(args.target, seconds, args.seed, args.corpus)
    with tempfile.TemporaryDirectory(prefix="pvrd-fuzz-") as corpus:
        child = [sys.executable, "-m", "tests.fuzz", args.target, "--seconds", str(seconds)]
        child += ["--seed", str(args.seed), "--corpus", corpus]
        code = subprocess.run(child, check=False).returncode
    trying = FINDINGS / f"{args.target}-trying"
    if code >= 0:
        trying.unlink(missing_ok=True)
        return code
    kept = trying.rename(FINDINGS / f"{args.target}-{-code}-{args.seed}")
    print(f"a finding, which ended the process by signal {-code}: {kept}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
