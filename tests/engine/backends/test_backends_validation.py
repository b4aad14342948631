# SPDX-License-Identifier: Apache-2.0
"""The gpu tests of the kernels and the engine under Khronos' validation layer.

Once with its checks of synchronisation, once with shaders that it instruments (GPU-assisted): they
say which invocation reads or writes beyond a buffer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PLACES = ("/usr/share/vulkan", "/usr/local/share/vulkan", "/etc/vulkan")
SYNCHRONISATION = ("SYNCHRONIZATION_VALIDATION",)
GPU_ASSISTED = ("GPU_ASSISTED", "GPU_ASSISTED_RESERVE_BINDING_SLOT")

# Two calls, the second of which reads what the first wrote. `no_barrier`: without the barrier that
# has to be between them; `short`: the first one's input is smaller than what it reads.
SABOTAGE = """
import sys
from dataclasses import replace
from engine.backends.vulkan import VulkanBackend, recording
from engine.program import Buffer
from tests.engine.backends.conftest import PARAMS, chain, chain_data
if sys.argv[1] == "no_barrier":
    recording.Hazards.add = lambda *_: False
program = chain()
if sys.argv[1] == "short":
    program = replace(program, buffers={**program.buffers, "x": Buffer("x", 256, "input")})
calls = program.sequences["first"] + program.sequences["second"]
opened = VulkanBackend(allow_software=True)
weights = opened.weights({"w": chain_data()[1]})
exe = opened.executable(replace(program, sequences={"all": calls}), weights)
exe.write("params", PARAMS)
exe.run("all")
exe.close()
weights.close()
opened.close()
"""

pytestmark = [pytest.mark.gpu, pytest.mark.long]


def run(folder: Path, checks: tuple[str, ...], *command: str) -> tuple[str, list[str]]:
    """What a Python program printed, and of that the layer's messages."""
    if not any(
        Path(p, "explicit_layer.d/VkLayer_khronos_validation.json").exists() for p in PLACES
    ):
        pytest.skip("the Vulkan validation layer is not installed")
    # A file would be begun anew by each instance.
    settings = {
        "debug_action": "VK_DBG_LAYER_ACTION_LOG_MSG",
        "report_flags": "error,warn",
        "log_filename": "stdout",
        "enables": ",".join(f"VK_VALIDATION_FEATURE_ENABLE_{check}_EXT" for check in checks),
    }
    lines = "".join(f"khronos_validation.{key} = {value}\n" for key, value in settings.items())
    (folder / "vk_layer_settings.txt").write_text(lines)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "VK_INSTANCE_LAYERS": "VK_LAYER_KHRONOS_validation",
            "VK_LAYER_SETTINGS_PATH": str(folder),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout, [line for line in done.stdout.splitlines() if "MessageID" in line]


@pytest.mark.parametrize(
    ("checks", "sabotage", "complaint"),
    [
        (SYNCHRONISATION, "no_barrier", "SYNC-HAZARD-READ-AFTER-WRITE"),
        (GPU_ASSISTED, "short", "access out of bounds. Descriptor size is 256"),
    ],
)
def test_the_layer_sees_what_is_wrong_and_no_other_fault(
    tmp_path: Path, checks: tuple[str, ...], sabotage: str, complaint: str
) -> None:
    _, messages = run(tmp_path, checks, "-c", SABOTAGE, sabotage)
    assert any(complaint in message for message in messages), messages
    assert run(tmp_path, checks, "-c", SABOTAGE, "") == ("", [])


# Instrumented shaders take minutes to compile, so that they are made once, for the kernels' tests.
# At each access by address they search a list of buffers; with thousands of positions that takes
# more rounds of loops than the 65,535 that llvmpipe seems to allow a shader, and what lies within a
# buffer is then called out of bounds.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("checks", "without", "folders"),
    [
        (SYNCHRONISATION, "smollm2", ["tests/kernels", "tests/engine"]),
        (GPU_ASSISTED, "far_from_the_start", ["tests/kernels"]),
    ],
    ids=["synchronisation", "gpu_assisted"],
)
def test_the_suite_is_valid(
    tmp_path: Path, checks: tuple[str, ...], without: str, folders: list[str]
) -> None:
    # -s, since pytest keeps what a passing test prints to itself.
    which = ["-m", "gpu and not long", "-k", f"not {without}", f"--basetemp={tmp_path / 't'}"]
    said, messages = run(
        tmp_path, checks, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *which, *folders
    )
    assert " passed" in said
    assert messages == []
