# SPDX-License-Identifier: Apache-2.0
"""The C kernels of another processor, cross-compiled, run by qemu: a backend for kernel tests."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.backends.base import NOTHING, Array, DeviceInfo, RunStats
from engine.backends.cpu import MAX_BINDINGS, MAX_PUSH_WORDS, CpuWeights, HostExecutable
from engine.program import Call, Program

ROOT = Path(__file__).resolve().parent.parent.parent
ISAS = {"aarch64": ("base", "dotprod"), "riscv64": ("base",)}
THREADS = 2


def missing(arch: str) -> str:
    """The program that this machine lacks for an architecture; "" when it can be emulated."""
    for tool in (f"{arch}-linux-gnu-gcc", f"qemu-{arch}-static"):
        if not shutil.which(tool):
            return tool
    return ""


class Emulated:
    """Cross-builds the kernels in a folder of its own; each slice is one run of qemu."""

    def __init__(self, arch: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=f"pvrd-{arch}-")
        self.arch, self.isa = arch, "base"
        self.info = DeviceInfo("cpu", f"qemu-{arch}", "C with OpenMP", True)
        here = Path(self._folder.name)
        build = here / "build"
        cross = ROOT / "tools" / "cross" / f"{arch}.ini"
        meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
        _run([*meson, "setup", f"--cross-file={cross}", "-Dspirv=false", str(build), str(ROOT)])
        _run([*meson, "compile", "-C", str(build), "pvrkernels"])
        self._replay = here / "replay"
        include, lib = ROOT / "kernels" / "include", build / "kernels"
        source = ROOT / "tests" / "kernels" / "runtime" / "replay.c"
        compiler = [f"{arch}-linux-gnu-gcc", "-O1", "-Wall", "-Werror", f"-I{include}"]
        linked = [f"-L{lib}", "-lpvrkernels", f"-Wl,-rpath,{lib}"]
        _run([*compiler, "-o", str(self._replay), str(source), *linked])

    def set_isa(self, name: str) -> None:
        """The instruction set of the slices to come."""
        self.isa = name

    def replay(self, data: bytes) -> bytes:
        """Runs the slice that replay.c reads; its output."""
        here = Path(self._folder.name)
        (here / "in").write_bytes(data)
        sysroot = f"/usr/{self.arch}-linux-gnu"
        emulator = [f"qemu-{self.arch}-static", "-L", sysroot]
        _run([*emulator, str(self._replay), str(here / "in"), str(here / "out")])
        return (here / "out").read_bytes()

    def weights(self, blobs: Mapping[str, Array]) -> CpuWeights:
        return CpuWeights(blobs)

    def executable(self, program: Program, weights: Any, lent: Any = NOTHING) -> EmulatedExecutable:
        return EmulatedExecutable(self, program, weights)

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self._folder.cleanup()


class EmulatedExecutable(HostExecutable):
    """Buffers here, slices there."""

    def __init__(self, backend: Emulated, program: Program, weights: CpuWeights) -> None:
        super().__init__({"bytes_uploaded": 0, "bytes_read_back": 0}, program, weights)
        self._backend = backend

    def run(self, *sequences: str) -> RunStats:
        names = list(self.program.buffers)
        views = [self.view(n) for n in names]
        calls = [c for s in sequences for c in self.program.sequences[s]]
        data = [
            struct.pack("<16s4I", self._backend.isa.encode(), THREADS, len(names), len(calls), 0)
        ]
        data.append(struct.pack(f"<{len(views)}Q", *(v.nbytes for v in views)))
        data += [v.tobytes() for v in views]
        data += [_record(c, names) for c in calls]
        out = self._backend.replay(b"".join(data))
        at = 0
        for view in views:
            view[:] = np.frombuffer(out, np.uint8, view.nbytes, at)
            at += view.nbytes
        return RunStats(wall_s=0.0)


def _record(call: Call, names: list[str]) -> bytes:
    bound = [names.index("params"), *(names.index(b.buffer) for b in call.bindings)]
    offsets = [0, *(b.offset for b in call.bindings)]
    rest = MAX_BINDINGS - len(bound)
    return struct.pack(
        f"<32s{4 * MAX_PUSH_WORDS}s{MAX_BINDINGS}i{MAX_BINDINGS}Q",
        call.op.encode(),
        call.push,
        *bound,
        *[-1] * rest,
        *offsets,
        *[0] * rest,
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout[-4000:]}"
