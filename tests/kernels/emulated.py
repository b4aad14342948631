# SPDX-License-Identifier: Apache-2.0
"""The C kernels of another processor, cross-compiled, run by qemu: a backend for kernel tests."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.backends.base import COUNTERS, NOTHING, Array, DeviceInfo, RunStats
from engine.backends.cpu import MAX_BINDINGS, MAX_PUSH_WORDS, CpuWeights, HostExecutable
from engine.program import Call, Program

ROOT = Path(__file__).resolve().parent.parent.parent
THREADS = 2


@dataclass(frozen=True)
class Cpu:
    """An instruction set of the library, qemu's options for a processor with it and no more, and
    what the kernel says of vectors (replay.c).
    """

    isa: str
    options: tuple[str, ...] = ()
    hwprobe: str = "unknown"


CPUS = {
    "aarch64": {"base": Cpu("base"), "dotprod": Cpu("dotprod")},
    "riscv64": {
        "base": Cpu("base", ("-cpu", "rv64,v=false")),
        "rvv128": Cpu("rvv", ("-cpu", "rv64,v=true,vext_spec=v1.0,vlen=128"), "v"),
        "rvv256": Cpu("rvv", ("-cpu", "rv64,v=true,vext_spec=v1.0,vlen=256"), "v"),
    },
}


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
        self.arch, self.cpu = arch, CPUS[arch]["base"]
        self.info = DeviceInfo("cpu", f"qemu-{arch}", "C with OpenMP", True)
        here = Path(self._folder.name)
        build = here / "build"
        files = (ROOT / "tools" / "cross" / name for name in (f"{arch}.ini", f"{arch}-qemu.ini"))
        cross = [f"--cross-file={path}" for path in files if path.exists()]
        meson = [sys.executable, "-m", "mesonbuild.mesonmain"]
        _run([*meson, "setup", *cross, "-Dspirv=false", str(build), str(ROOT)])
        _run([*meson, "compile", "-C", str(build), "pvrkernels"])
        self._replay = here / "replay"
        include, lib = ROOT / "kernels" / "include", build / "kernels"
        source = ROOT / "tests" / "kernels" / "runtime" / "replay.c"
        compiler = [f"{arch}-linux-gnu-gcc", "-O1", "-Wall", "-Werror", f"-I{include}"]
        linked = [f"-L{lib}", "-lpvrkernels", f"-Wl,-rpath,{lib}"]
        _run([*compiler, "-o", str(self._replay), str(source), *linked])

    def set_isa(self, name: str) -> None:
        """The processor (of CPUS) of the slices to come."""
        self.cpu = CPUS[self.arch][name]

    def chosen(self, cpu: Cpu, **environment: str) -> str:
        """The instruction set that the library takes on a processor by itself."""
        return self._emulate(cpu, **environment).strip()

    def replay(self, data: bytes) -> bytes:
        """Runs the slice that replay.c reads; its output."""
        here = Path(self._folder.name)
        (here / "in").write_bytes(data)
        self._emulate(self.cpu, str(here / "in"), str(here / "out"))
        return (here / "out").read_bytes()

    def _emulate(self, cpu: Cpu, *arguments: str, **environment: str) -> str:
        emulator = [f"qemu-{self.arch}-static", "-L", f"/usr/{self.arch}-linux-gnu", *cpu.options]
        given = {**os.environ, "HWPROBE": cpu.hwprobe, **environment}
        return _run([*emulator, str(self._replay), *arguments], given)

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
        super().__init__(dict.fromkeys(COUNTERS, 0), program, weights)
        self._backend = backend

    def run(self, *sequences: str) -> RunStats:
        names = list(self.program.buffers)
        views = [self.view(n) for n in names]
        calls = [c for s in sequences for c in self.program.sequences[s]]
        data = [
            struct.pack(
                "<16s4I", self._backend.cpu.isa.encode(), THREADS, len(names), len(calls), 0
            )
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


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout[-4000:]}"
    return done.stdout
