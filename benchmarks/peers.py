# SPDX-License-Identifier: Apache-2.0
"""The programs that we measure against, built in a cache folder outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
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


def llama_cpp() -> Path:
    """The folder with LLAMA_TOOLS; the first call builds them (minutes).

    Raises:
        subprocess.CalledProcessError: pip or cmake failed; their own words are on stderr.
    """
    top = cache() / f"llama-cpp-python-{LLAMA_VERSION}"
    binaries = top / "build/bin"
    if not all((binaries / tool).exists() for tool in LLAMA_TOOLS):
        if not (top / "src").exists():
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
            _run(
                *pip,
                "--no-binary",
                "llama-cpp-python",
                "-d",
                str(top),
                f"llama-cpp-python=={LLAMA_VERSION}",
            )
            with tarfile.open(next(top.glob("*.tar.gz"))) as tar:
                tar.extractall(top / "unpack", filter="data")
            next((top / "unpack").iterdir()).rename(top / "src")
        source = top / "src/vendor/llama.cpp"
        _run("cmake", "-S", str(source), "-B", str(top / "build"), *LLAMA_FLAGS)
        targets = ["-t", *LLAMA_TOOLS]
        _run("cmake", "--build", str(top / "build"), "-j", str(os.cpu_count() or 1), *targets)
    return binaries


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
