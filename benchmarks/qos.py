# SPDX-License-Identifier: Apache-2.0
"""What others lose beside pvrd, and what pvrd gets done beside them.

    python -m benchmarks.qos [--quick] [--json] [--parts gpu,weston,days,control] [--cases CASE,…]
        [--frames N] [--seconds S] [--software] [--shape NAME] [--layers N] [--video WxH] [--fps F]
        [--config KEY=VALUE …]

gpu      a compositor of the benchmark's own on a real GPU, alone, beside pvrd and beside llama.cpp
         (benchmarks/qos_gpu); a software device will do with --software, which shows that all of
         it works and says nothing of times
weston   Weston without a screen beside pvrd's CPU path (benchmarks/qos_weston)
control  reading a property of pvrd while both its workers are saturated (benchmarks/qos_control)
days     the governor on recorded days against static policies and its bounds, by a model of power
         (benchmarks/qos_days, qos_life, qos_power)

On an H200, where a command has ten minutes, in two commands (PVRD_LLAMA_VULKAN: the folder of a
llama-bench with Vulkan; dbus-daemon is needed; nothing is fetched):

    python -m benchmarks.qos --parts gpu --cases pvrd --seconds 560                    8.5 minutes
    python -m benchmarks.qos --parts gpu --cases wallpaper,llama --frames 6000 --seconds 560
                                                                                         7 minutes

The first: 10,000 frames alone and 10,000 beside pvrd are 167 s each; 30 s the compositor's start
and the model's file, 130 s pvrd's first token (weights are packed, kernels tried and timed), 23 s
of text without a compositor among them. The second: 6,000 frames alone (100 s and 30), 2,000 of the
wallpaper alone and 2,000 beside pvrd (67 s and 50), 6,000 beside llama.cpp (100 s and 60). With
`blind`, 66 s, the first has no time to spare. --seconds bounds all of it: where that is too little
each case that is left has as much less of its frames, and one that hangs ends
(benchmarks/qos_time).

Targets stand as peers named `target`: a ratio of 1 or more meets them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import common

PARTS = ("gpu", "weston", "control", "days")
FRAMES, QUICK_FRAMES = 10_000, 120
FAILED: list[str] = []  # cases, and why


def _quick(args: argparse.Namespace) -> None:
    """What is smaller with --quick; what was asked for stays."""
    small = args.quick
    args.frames = args.frames or (QUICK_FRAMES if small else FRAMES)
    args.shape = args.shape or ("tiny" if small else "llama3-8b")
    args.video = args.video or ("320x180" if small else "1920x1080")
    args.fps = args.fps or 25.0
    args.lone = args.lone or (2.0 if small else 8.0)
    args.llama_tokens = 16 if small else 128
    args.rounds = 1 if small else args.rounds
    args.failed = FAILED


def measure(args: argparse.Namespace) -> list[common.Row]:
    parts = args.parts.split(",")
    if strange := set(parts) - set(PARTS):
        raise SystemExit(f"there is no part {sorted(strange)[0]}, but {', '.join(PARTS)}")
    _quick(args)
    rows: list[common.Row] = []
    with tempfile.TemporaryDirectory(prefix="qos-") as name:
        folder = Path(name)
        if "gpu" in parts:
            from benchmarks import qos_gpu

            for row in qos_gpu.measure(args, folder):
                print(f"{row.name}: {row.ours:.2f} {row.unit}", file=sys.stderr, flush=True)
                rows.append(row)
        if "weston" in parts:
            from benchmarks import qos_weston

            rows += qos_weston.beside(args, folder)
        if "control" in parts:
            from benchmarks import qos_control

            rows += qos_control.control(args, folder)
        if "days" in parts:
            from benchmarks import qos_days

            rows += qos_days.rows()
    return rows


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which ({','.join(PARTS)})")
    parser.add_argument(
        "--cases", default="pvrd,blind,wallpaper,llama", help="of the part gpu (benchmarks/qos_gpu)"
    )
    parser.add_argument("--frames", type=int, help=f"of the compositor ({FRAMES})")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="of the part gpu at most (0: any)"
    )
    parser.add_argument("--software", action="store_true", help="a GPU in software will do")
    parser.add_argument("--shape", help="of the model (llama3-8b), see tools/random_gguf")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape's")
    parser.add_argument("--video", metavar="WxH", help="of the stream before it is enlarged")
    parser.add_argument("--tier", default="balanced", help="network of the stream (balanced)")
    parser.add_argument("--fps", type=float, help="frames/s of the stream (25)")
    parser.add_argument("--lone", type=float, help="seconds of pvrd without a compositor (8)")
    parser.add_argument(
        "--config", action="append", default=[], metavar="KEY=VALUE", help="of pvrd, as in TOML"
    )
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="slices and frames, of 2 s")
    parser.add_argument("--rounds", type=int, default=5, help="of Weston's cases and of reads (5)")
    parser.add_argument("--llama", action="store_true", help="builds llama.cpp for Weston's cases")


def facts() -> dict[str, str]:
    found = {"load average": " ".join(f"{x:.1f}" for x in os.getloadavg())}
    return found | ({"failed": "; ".join(FAILED)} if FAILED else {})


if __name__ == "__main__":
    sys.exit(common.main((__doc__ or "").splitlines()[0], measure, options, facts) or bool(FAILED))
