# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the CPU beside us."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.peer_process import LARGE_PAGES, Peer, Process


@dataclass(frozen=True, order=True)
class Way:
    """How llama.cpp runs: weights laid out anew for its kernels or not, flash attention or not."""

    repack: bool
    attention: bool

    def __str__(self) -> str:
        return f"{'re' if self.repack else 'not re'}packed, fa {'on' if self.attention else 'off'}"


# The first is how it runs by itself.
WAYS = tuple(Way(repack, attention) for repack in (True, False) for attention in (True, False))


def environment(clock: str) -> dict[str, str]:
    """What llama.cpp is run with."""
    env = dict(os.environ) | LARGE_PAGES
    env.pop("GOMP_SPINCOUNT", None)  # our kernels' library sets it, for itself
    if clock == "cpu":  # where others have the CPU that a thread waits for, it would spin
        env["OMP_WAIT_POLICY"] = "passive"
    return env


class LlamaPeer(Peer[Way]):
    """llama.cpp with one file, which decodes behind a prompt of `behind` tokens. By the clock `cpu`
    its threads sleep where they wait for each other. Where the program ends SystemExit is raised.
    """

    def __init__(
        self,
        file: Path,
        threads: int,
        clock: str,
        behind: int = 1,
        program: Path | None = None,
    ) -> None:
        super().__init__(clock, WAYS)
        source = Path(__file__).with_name("llama_rate.cpp")
        self._program = program or peers.llama_program(source)
        self._file, self._threads, self._behind = file, threads, behind

    def _process(self, way: Way) -> Process:
        command = [str(self._program), str(self._file), str(self._threads)]
        command += [str(int(way.repack)), str(int(way.attention)), str(self._behind)]
        return Process(command, _ended, environment(self._clock))


def _ended(line: str) -> SystemExit:
    return SystemExit(f"llama_rate ended at {line!r}.")
