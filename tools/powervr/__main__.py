# SPDX-License-Identifier: Apache-2.0
"""`make powervr`: every kernel variant through the real PowerVR compiler, compared with the table
in docs/powervr.md.

    python -m tools.powervr [--keep] [--update] [--core CORE]... [--op OP]... [--deadline S]

Exit status 1 when a baseline kernel fails, hangs, aborts or spills on a core, or anything is worse
than the table; 2 when the driver cannot be had.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kernels
from engine.backends.gate import misfit
from tools.powervr import probe, profile, sysroot, table

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "powervr.md"


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make powervr", allow_abbrev=False)
    parser.add_argument("--keep", action="store_true", help="write the table and the profiles")
    parser.add_argument("--update", action="store_true", help="fetch the driver anew")
    parser.add_argument(
        "--core", action="append", choices=list(probe.CORES), help="only this core (repeatable)"
    )
    parser.add_argument("--op", action="append", help="only this operation (repeatable)")
    parser.add_argument("--deadline", type=float, default=60, help="seconds for one pipeline")
    return parser.parse_args(argv)


def measure(
    root: Path, core: str, entry: Mapping[str, Any], made: Mapping[str, Any], deadline: float
) -> table.Row:
    """One variant (an entry of kernels.manifest()) on a core with the profile `made`: through the
    engine's gate, then through the compiler.
    """
    baseline = bool(entry["baseline"])
    if reason := misfit(entry, profile.limits_of(made), frozenset(made["features"])):
        return table.Row("gated", baseline, detail=reason)
    file = kernels.artifacts() / entry["file"]
    got = probe.pipeline(root, core, file, entry["bindings"], entry["push_bytes"], deadline)
    if got.state != "ok":
        return table.Row(got.state, baseline, detail=got.detail)
    return table.from_statistics(got.statistics, baseline)


class _Hangs:
    """Counts pipelines that never came; after MOST of them the compiler is not asked any more, so
    that the command ends.
    """

    MOST = 6

    def __init__(self) -> None:
        self.count = 0

    def measure(
        self, root: Path, core: str, entry: Mapping[str, Any], made: Mapping[str, Any], limit: float
    ) -> table.Row:
        if self.count >= self.MOST:
            why = f"not tried, {self.count} others did not return"
            return table.Row("hung", bool(entry["baseline"]), detail=why)
        row = measure(root, core, entry, made, limit)
        self.count += row.state == "hung"
        return row


def _measure_all(
    root: Path, profiles: Mapping[str, Mapping[str, Any]], ops: Sequence[str], deadline: float
) -> dict[table.Key, table.Row]:
    work = [
        ((core, op, variant), entry)
        for core in profiles
        for op, variants in kernels.manifest().items()
        for variant, entry in variants.items()
        if op in ops
    ]
    out = {}
    hangs = _Hangs()
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        jobs = [
            (key, pool.submit(hangs.measure, root, key[0], entry, profiles[key[0]], deadline))
            for key, entry in work
        ]
        for (core, op, variant), job in jobs:
            row = job.result()
            out[core, op, variant] = row
            detail = f"  ({row.detail})" if row.detail and row.state != "ok" else ""
            print(f"  {core:10} {op + '.' + variant:24} {row.cell()}{detail}", flush=True)
    return out


def _say(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"\n{title}")
        for line in lines:
            print(f"  {line}")


def _print_profile(made: Mapping[str, Any]) -> None:
    words = ", ".join(f"{k} {v}" for k, v in made["limits"].items())
    print(f"{made['queried']['deviceName']} ({made['driver']}):\n  {words}")
    print(f"  features: {', '.join(made['features'])}")


def main(argv: Sequence[str]) -> int:
    """See the head of this file."""
    options = _arguments(argv)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a compiler that aborts would leave one
    known = kernels.manifest()
    ops = options.op or list(known)
    if unknown := sorted(set(ops) - set(known)):
        print(f"make powervr: there is no operation {unknown[0]}", file=sys.stderr)
        return 2
    if options.keep and (options.core or options.op):
        print("make powervr: --keep is for all cores and operations", file=sys.stderr)
        return 2
    print(f"The driver of Debian sid for arm64 lies in {sysroot.cache()}, apart from the system.")
    try:
        root, packages = sysroot.prepare(options.update)
        print(f"Mesa {packages['mesa-vulkan-drivers']} in {len(packages)} packages, under qemu.\n")
        cores = options.core or list(probe.CORES)
        profiles = {core: profile.make(core, probe.info(root, core)) for core in cores}
        for made in profiles.values():
            _print_profile(made)
        print("\nInstruction groups / temporary registers / registers spilled:")
        found = _measure_all(root, profiles, ops, options.deadline)
    except sysroot.SysrootError as e:
        print(f"make powervr: {e}", file=sys.stderr)
        return 2
    document = DOCUMENT.read_text("utf-8")
    kept = {k: row for k, row in table.parse(document, probe.CORES).items() if k[1] in ops}
    sources = f"Mesa {packages['mesa-vulkan-drivers']}"
    bad = table.faults(found)
    differs = table.changes(kept, found, cores)
    if kept and sources not in document:
        differs.insert(0, f"the table is not from {sources}")
    for core, made in profiles.items():
        differs += profile.differences(profile.kept(core), made)
    if options.keep and not bad:
        DOCUMENT.write_text(table.insert(document, table.render(found, probe.CORES, sources)))
        for made in profiles.values():
            profile.keep(made)
        _say("Written to docs/powervr.md and tools/powervr/profiles:", differs or ["no change"])
        return 0
    bad += table.regressions(kept, {k: row for k, row in found.items() if not row.baseline})
    _say("Different from docs/powervr.md (`make powervr KEEP=1` writes it down):", differs)
    _say("WORSE:", bad)
    if bad:
        return 1
    ok = sum(row.state == "ok" for row in found.values())
    gated = sum(row.state == "gated" for row in found.values())
    print(
        f"\nOn {', '.join(probe.CORES[c] for c in cores)}: {ok} pipelines created, {gated} not "
        "handed to the driver; no baseline kernel fails, hangs, aborts or spills."
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
