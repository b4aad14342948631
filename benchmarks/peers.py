# SPDX-License-Identifier: Apache-2.0
"""The programs that we measure against, built in a cache folder outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

LLAMA_VERSION = "0.3.36"  # of llama-cpp-python: its sdist holds llama.cpp's sources
LLAMA_TOOLS = ("llama-bench", "llama-quantize", "llama-perplexity")
LLAMA_FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_OPENMP=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
]


def cache() -> Path:
    """$PVRD_PEERS, else ~/.cache/pvrd/peers; made when absent."""
    path = Path(os.environ.get("PVRD_PEERS") or Path.home() / ".cache/pvrd/peers")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _run(*command: str, cwd: Path | None = None) -> None:
    print("+", " ".join(command), file=sys.stderr)
    subprocess.run(command, cwd=cwd, check=True, stdout=sys.stderr)


def _llama_top() -> Path:
    return cache() / f"llama-cpp-python-{LLAMA_VERSION}"


def llama_sources() -> Path:
    """llama.cpp's sources; the first call fetches them.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    top = _llama_top()
    if not (top / "src").exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        package = ["--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_VERSION}"]
        _run(*pip, "-d", str(top), *package)
        unpack(next(top.glob("*.tar.gz")), top / "unpack")
        next((top / "unpack").iterdir()).rename(top / "src")
    return top / "src/vendor/llama.cpp"


def unpack(archive: Path, folder: Path) -> None:
    """A tar archive's files and folders, none of them outside of `folder`.

    Raises:
        SystemExit: the archive names a file elsewhere, or a thing that is neither.
        OSError, tarfile.TarError
    """
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
            return
        inside = folder.resolve()  # Python before 3.11.4
        for member in tar:
            plain = member.isreg() or member.isdir()
            if not plain or not (inside / member.name).resolve().is_relative_to(inside):
                raise SystemExit(f"{archive.name} holds {member.name}, which is not unpacked.")
            tar.extract(member, folder)


def _built(folder: str, tools: Sequence[str], flags: Sequence[str]) -> Path:
    """The folder with these tools, built in a folder of that name when one is missing."""
    build = _llama_top() / folder
    if not all((build / "bin" / tool).exists() for tool in tools):
        _run("cmake", "-S", str(llama_sources()), "-B", str(build), *flags)
        jobs = str(os.cpu_count() or 1)
        _run("cmake", "--build", str(build), "-j", jobs, "-t", *tools)
    return build / "bin"


def llama_cpp() -> Path:
    """The folder with LLAMA_TOOLS; the first call builds them (minutes).

    Raises:
        subprocess.CalledProcessError: pip or cmake failed; their own words are on stderr.
    """
    return _built("build", LLAMA_TOOLS, LLAMA_FLAGS)


def llama_words() -> str:
    """Version and flags of llama_cpp()."""
    return f"llama-cpp-python {LLAMA_VERSION}, {' '.join(LLAMA_FLAGS)}"


def llama_program(source: Path) -> Path:
    """A C++ program of ours, compiled against the library of llama_cpp() when it is newer.

    Raises:
        subprocess.CalledProcessError: it does not compile, or the library was not built.
    """
    top, out = llama_cpp().parent, _llama_top() / source.stem
    if not out.exists() or out.stat().st_mtime < source.stat().st_mtime:
        headers = [f"-I{llama_sources() / folder}" for folder in ("include", "ggml/include")]
        names = ("src/libllama.a", "ggml/src/libggml.a", "ggml/src/libggml-cpu.a")
        libraries = [str(top / name) for name in (*names, "ggml/src/libggml-base.a")]
        command = ["c++", "-O2", *headers, str(source), "-o", str(out), *libraries]
        _run(*command, "-fopenmp", "-ldl", "-lpthread", "-lm")
    return out


def llama_vulkan() -> Path | None:
    """The folder with a llama-bench for Vulkan, or None.

    $PVRD_LLAMA_VULKAN names one. Otherwise it is built, where cmake finds Vulkan's and SPIR-V's
    headers and a glslc ($PVRD_GLSLC, or in PATH). An old glslc knows no cooperative matrices, and
    the comparison would be unfair: shaderc 2026 does (in Debian sid).

    Raises:
        SystemExit: the folder that was named has none.
    """
    if env := os.environ.get("PVRD_LLAMA_VULKAN"):
        if not (Path(env) / "llama-bench").exists():
            raise SystemExit(f"$PVRD_LLAMA_VULKAN: there is no llama-bench in {env}.")
        return Path(env).absolute()
    flags = [*LLAMA_FLAGS, "-DGGML_VULKAN=ON"]
    if glslc := os.environ.get("PVRD_GLSLC"):
        flags.append(f"-DVulkan_GLSLC_EXECUTABLE={glslc}")
    try:
        return _built("build-vulkan", ["llama-bench"], flags)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"llama.cpp for Vulkan is not to be had here: {error}", file=sys.stderr)
        return None


def wheel(package: str) -> str:
    """Imports a peer that comes as a wheel, installed into the cache when absent; its version.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    import importlib
    import importlib.metadata

    site = cache() / f"site-{sys.version_info.major}.{sys.version_info.minor}"
    if str(site) not in sys.path:
        sys.path.append(str(site))
    try:
        importlib.import_module(package)
    except ImportError:
        _run(sys.executable, "-m", "pip", "install", "-q", "--target", str(site), package)
        importlib.invalidate_caches()
        importlib.import_module(package)
    return importlib.metadata.version(package)
