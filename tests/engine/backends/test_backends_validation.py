# SPDX-License-Identifier: Apache-2.0
"""The backend and every kernel under Khronos' validation layer, synchronisation included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PLACES = ("/usr/share/vulkan", "/usr/local/share/vulkan", "/etc/vulkan")

# A chain without a barrier where one is needed, for being sure that the layer sees.
SABOTAGE = """
import sys
from dataclasses import replace
from engine.backends.vulkan import VulkanBackend, recording
from tests.engine.backends.conftest import PARAMS, chain, chain_data
if sys.argv[1] == "broken":
    recording.Hazards.add = lambda *_: False
opened = VulkanBackend(allow_software=True)
program = chain()
calls = program.sequences["first"] + program.sequences["second"]
weights = opened.weights({"w": chain_data()[1]})
exe = opened.executable(replace(program, sequences={"all": calls}), weights)
exe.write("params", PARAMS)
exe.run("all")
exe.close()
weights.close()
opened.close()
"""

pytestmark = [pytest.mark.gpu, pytest.mark.long]


@pytest.fixture
def complaints(tmp_path: Path) -> Path:
    """Where the layer writes what it finds; vk_layer_settings.txt lies beside it."""
    found = any(
        Path(p, "explicit_layer.d/VkLayer_khronos_validation.json").exists() for p in PLACES
    )
    if not found:
        pytest.skip("the Vulkan validation layer is not installed")
    log = tmp_path / "log.txt"
    lines = {
        "debug_action": "VK_DBG_LAYER_ACTION_LOG_MSG",
        "report_flags": "error,warn",
        "log_filename": str(log),
        "enables": "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT",
        "validate_sync": "true",
    }
    settings = "".join(f"khronos_validation.{k} = {v}\n" for k, v in lines.items())
    (tmp_path / "vk_layer_settings.txt").write_text(settings)
    return log


def run(log: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "VK_INSTANCE_LAYERS": "VK_LAYER_KHRONOS_validation",
            "VK_LAYER_SETTINGS_PATH": str(log.parent),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return log.read_text()


def test_the_layer_sees_a_missing_barrier_and_no_other_fault(complaints: Path) -> None:
    assert "SYNC-HAZARD" in run(complaints, "-c", SABOTAGE, "broken")
    assert run(complaints, "-c", SABOTAGE, "right") == ""


def test_all_kernels_are_valid(complaints: Path) -> None:
    names = ("all", "crosscheck")
    tests = ["tests/kernels", *(f"tests/engine/backends/test_backends_{n}.py" for n in names)]
    found = run(complaints, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *tests)
    assert found == ""
