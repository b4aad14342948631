# SPDX-License-Identifier: Apache-2.0
"""python -m tests.parts [--lanes N] [--part NAME]...: the long tests in parts, each a pytest of its
own, N (2) of them at a time.

Many long tests wait, or work on one CPU alone: two beside each other need little more time than
one. What a part says is shown when it is over, and kept in build/long. Exit status 1 when one
failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build/long"
VALIDATION = "tests/engine/backends/test_backends_validation.py"
PROFILES = "tests/engine/backends/test_backends_profiles.py"

# In the order in which they begin. The soak's latency is to be flat, and nothing is as steady
# beside it as the fuzzer; then the longest first. What builds in build/ stays in one part.
PARTS: dict[str, tuple[str, ...]] = {
    "soak": ("tests/faults/test_soak.py",),
    "fuzz": ("tests/fuzz",),
    "faults": ("tests/faults/test_fault_matrix.py",),
    "packages": ("tests/boot", "tests/packaging"),
    "instrumented": (f"{VALIDATION}::test_the_suite_is_valid[gpu_assisted]",),
    "kernels": ("tests/kernels",),
    "profiles": (PROFILES,),
    "validation": (f"{VALIDATION}::test_the_suite_is_valid[synchronisation]",),
    "rest": (),  # all that no other part has
}


def arguments(part: str) -> list[str]:
    """pytest's, of a part: together they are all tests, each once."""
    if PARTS[part]:
        return list(PARTS[part])
    return [f"--deselect={test}" for tests in PARTS.values() for test in tests]


class Lanes:
    """Runs parts, a few at a time."""

    def __init__(self, parts: list[str]) -> None:
        self._left = parts
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.codes: dict[str, int] = {}

    def run(self, lanes: int) -> None:
        """All of them. A signal ends what runs and begins nothing more."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._stop())
        threads = [threading.Thread(target=self._lane) for _ in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _stop(self) -> None:
        self._left.clear()
        for process in list(self._running.values()):
            process.send_signal(signal.SIGINT)

    def _lane(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                part = self._left.pop(0)
                print(f"{clock()} {part} begins", flush=True)
                process = self._running[part] = self._begin(part)
            began = time.monotonic()
            _, status, used = os.wait4(process.pid, 0)  # and all that it waited for itself
            code = process.returncode = os.waitstatus_to_exitcode(status)
            with self._lock:
                del self._running[part]
                self.codes[part] = code
                took, cpu = time.monotonic() - began, used.ru_utime + used.ru_stime
                print(f"\n{clock()} {part}: exit status {code} after {took:.0f} s, "
                      f"{cpu:.0f} s of a processor", flush=True)  # fmt: skip
                print((LOGS / f"{part}.log").read_text(errors="replace"), flush=True)

    def _begin(self, part: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pytest", "-m", "long", "-q", "--durations=8"]
        command += ["-p", "no:cacheprovider", *arguments(part)]
        with (LOGS / f"{part}.log").open("wb") as log:
            # In a group of its own: an interrupt from the terminal reaches it by _stop, once.
            return subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                process_group=0,
            )  # fmt: skip


def clock() -> str:
    return time.strftime("%H:%M:%S")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.parts", description="The long tests, in parts beside each other."
    )
    parser.add_argument("--lanes", type=int, default=2, help="how many at a time")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only these")
    args = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    parts = args.part or list(PARTS)
    began, before = time.monotonic(), os.times()
    lanes = Lanes(list(parts))
    lanes.run(args.lanes)
    after = os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])
    minutes = (time.monotonic() - began) / 60
    print(f"{minutes:.1f} minutes, {cpu / 60:.1f} of a processor; load {os.getloadavg()[0]:.1f}")
    failed = [p for p in parts if lanes.codes.get(p) != 0]
    print("failed or not run: " + ", ".join(failed) if failed else "all parts passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
