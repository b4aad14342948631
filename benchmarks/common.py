# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: rows, the machine's record, the table and the JSON list."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.backends.base import Backend

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Row:
    """One figure; `ratio` is how many times better ours is, None without a peer."""

    name: str
    unit: str
    ours: float
    peer: float | None
    peer_name: str
    ratio: float | None


def row(name: str, unit: str, ours: float, peer: float | None, peer_name: str) -> Row:
    """A Row whose ratio respects the unit: of times (ms, s) less is better; none with a zero."""
    ratio = None
    if peer and ours:
        ratio = peer / ours if unit.split()[0] in ("ms", "s", "us") else ours / peer
    return Row(name, unit, ours, peer, peer_name, ratio)


def interleaved(
    ours: Callable[[], float], peer: Callable[[], float], repeats: int
) -> tuple[list[float], list[float]]:
    """Runs A and B in turn, so that a drift of the host meets both alike."""
    a: list[float] = []
    b: list[float] = []
    for _ in range(repeats):
        a.append(ours())
        b.append(peer())
    return a, b


def median_ratio(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Median of the ratios a/b and its lower 95% bound (order statistics of the sign test)."""
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    n = len(ratios)
    k = max(0, int((n - 1.96 * n**0.5) / 2))
    return statistics.median(ratios), ratios[k]


def _clock_mhz() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return line.split(":")[1].strip()
    return "unknown"


def cpu_name() -> str:
    """Model name and number of CPUs that this process may use."""
    import os

    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":")[1].strip()
            break
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs"


def commit() -> str:
    """The commit that is measured, with + when the tree differs from it."""
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return out.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def backend(args: argparse.Namespace) -> Backend:
    """What `--device` asks for: the CPU with `--threads`, or the GPU, a software one too."""
    if args.device == "gpu":
        from engine.backends.vulkan import VulkanBackend

        return VulkanBackend(allow_software=True)
    from engine.backends.cpu import CpuBackend

    return CpuBackend(args.threads)


def main(
    description: str,
    measure: Callable[[argparse.Namespace], list[Row]],
    options: Callable[[argparse.ArgumentParser], None] | None = None,
    facts: Callable[[], dict[str, str]] | None = None,
) -> int:
    """Command line of a benchmark: measures, then prints a table, or with --json one list."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--json", action="store_true", help="one JSON list; the record goes to stderr"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes; done within a minute")
    parser.add_argument("--threads", type=int, default=2)
    if options:
        options(parser)
    args = parser.parse_args()
    before = _clock_mhz()
    rows = measure(args)
    record = {"cpu": cpu_name(), "kernel": platform.release(), "commit": commit()}
    record |= {"clock_mhz": f"{before} before, {_clock_mhz()} after"}
    if facts:
        record |= facts()
    out = sys.stderr if args.json else sys.stdout
    for key, value in record.items():
        print(f"{key}: {value}", file=out)
    if args.json:
        print(json.dumps([asdict(r) for r in rows], indent=1))
        return 0
    print(f"\n{'':40} {'ours':>10} {'peer':>10} {'ratio':>7}  unit, peer")
    for r in rows:
        peer = f"{r.peer:10.2f}" if r.peer is not None else f"{'-':>10}"
        ratio = f"{r.ratio:6.2f}x" if r.ratio is not None else f"{'-':>7}"
        print(f"{r.name:40} {r.ours:10.2f} {peer} {ratio}  {r.unit}, {r.peer_name}")
    return 0
