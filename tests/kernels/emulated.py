# SPDX-License-Identifier: Apache-2.0
"""The C kernels of another processor, cross-compiled, run by qemu: a backend for kernel tests."""

from __future__ import annotations

import contextlib
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
from engine.backends.cpu import MAX_BINDINGS, MAX_PUSH_WORDS
from engine.backends.host import HostExecutable, HostWeights
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
    """Cross-builds the kernels in a folder of its own; a process of qemu for each processor."""

    def __init__(self, arch: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=f"pvrd-{arch}-")
        self.arch, self.cpu = arch, CPUS[arch]["base"]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
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
        return _run(self._command(cpu), self._environment(cpu) | environment).strip()

    def replay(self, data: bytes, nbytes: int) -> bytes:
        """Runs the slice that replay.c reads; what it writes, so many bytes.

        Raises:
            AssertionError: the process ended; the next slice gets another one.
        """
        key = " ".join((self.cpu.isa, self.cpu.hwprobe, *self.cpu.options))
        if key not in self._running:
            with self._log(key).open("wb") as log:
                self._running[key] = subprocess.Popen(
                    [*self._command(self.cpu), "-"], env=self._environment(self.cpu),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                )  # fmt: skip
        process = self._running[key]
        assert process.stdin is not None
        assert process.stdout is not None
        out = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(data)
            process.stdin.flush()
            out = process.stdout.read(nbytes)
        if len(out) < nbytes:
            code = _ended(self._running.pop(key))
            raise AssertionError(f"{key}: {code}\n{self._log(key).read_text()[-4000:]}")
        return out

    def _log(self, key: str) -> Path:
        return Path(self._folder.name) / f"{key}.log"

    def _command(self, cpu: Cpu) -> list[str]:
        emulator = [f"qemu-{self.arch}-static", "-L", f"/usr/{self.arch}-linux-gnu", *cpu.options]
        return [*emulator, str(self._replay)]

    def _environment(self, cpu: Cpu) -> dict[str, str]:
        return {**os.environ, "HWPROBE": cpu.hwprobe}

    def weights(self, blobs: Mapping[str, Array]) -> HostWeights:
        return HostWeights(blobs)

    def executable(self, program: Program, weights: Any, lent: Any = NOTHING) -> EmulatedExecutable:
        return EmulatedExecutable(self, program, weights)

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        for process in self._running.values():
            _ended(process)
        self._folder.cleanup()


class EmulatedExecutable(HostExecutable):
    """Buffers here, slices there."""

    def __init__(self, backend: Emulated, program: Program, weights: HostWeights) -> None:
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
        out = self._backend.replay(b"".join(data), sum(v.nbytes for v in views))
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


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Waits for the end of a process that has nothing more to read; its exit status."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    return process.wait(60)


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
