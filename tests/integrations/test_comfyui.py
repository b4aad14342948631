# SPDX-License-Identifier: Apache-2.0
"""The ComfyUI nodes by ComfyUI's contract, loaded as it loads custom nodes, with a real pvrd."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.video import plain
from pvrd.client import NoDaemon
from pvrd.errors import PvrdError
from tests.buses import ROOT
from tests.daemons import PROMPT, Daemon, write_tiny
from tests.engine.video.conftest import psnr, scene

TYPES = {"IMAGE", "STRING", "INT", "FLOAT", "BOOLEAN", "MASK"}


class Tensor:
    """As much of torch's as ComfyUI's images show of themselves."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.shape = values.shape

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def float(self) -> Tensor:
        return Tensor(np.asarray(self.values, np.float32))

    def numpy(self) -> Any:
        assert self.values.dtype == np.float32
        return self.values


class Interrupted(Exception):
    """What ComfyUI raises when its user cancels."""


class Comfy:
    """ComfyUI's side: what the progress bar was told, and whether the user cancels."""

    def __init__(self) -> None:
        self.total = self.steps = 0
        self.cancel_at: int | None = None

    def bar(self, total: int) -> Any:
        self.total, self.steps = total, 0
        return types.SimpleNamespace(update=self._update)

    def _update(self, count: int) -> None:
        self.steps += count

    def look(self) -> None:
        if self.cancel_at is not None and self.steps >= self.cancel_at:
            raise Interrupted


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> Comfy:
    made = Comfy()
    modules: dict[str, dict[str, Any]] = {
        "comfy": {},
        "comfy.utils": {"ProgressBar": made.bar},
        "comfy.model_management": {"throw_exception_if_processing_interrupted": made.look},
        "torch": {"from_numpy": Tensor},
    }
    for name, values in modules.items():
        module = types.ModuleType(name)
        for key, value in values.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
    return made


# What ComfyUI's loader does with a folder in custom_nodes: its path is the module's name.
LOADER = """
def load(folder):
    import importlib.util, os, sys
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    for made in module.NODE_CLASS_MAPPINGS.values():
        made.RELATIVE_PYTHON_MODULE = "custom_nodes." + os.path.basename(folder)
    return module
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder as the README says, a link in a ComfyUI whose own path has a dot."""
    custom = tmp_path_factory.mktemp("Comfy.UI") / "custom_nodes"
    custom.mkdir()
    (custom / "comfyui-pvrd").symlink_to(ROOT / "integrations/comfyui")
    return custom / "comfyui-pvrd"


@pytest.fixture(scope="module")
def nodes(folder: Path) -> Any:
    """The folder as a module."""
    names: dict[str, Any] = {}
    exec(LOADER, names)
    return names["load"](folder)


@pytest.fixture(params=["plain", "in a loop"])
def run(request: pytest.FixtureRequest) -> Any:
    """Calls a node as ComfyUI did, or as it does since its executor is a coroutine."""

    def called(function: Any, *given: Any, **more: Any) -> Any:
        async def executor() -> Any:
            return function(*given, **more)

        return function(*given, **more) if request.param == "plain" else asyncio.run(executor())

    return called


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("comfy")
    (folder / "models").mkdir()
    write_tiny(folder / "models")
    config = {"models.text": "tiny", "gpu.enabled": False, "sensors.system": False}
    with Daemon(folder, folder / "models", config) as made:
        made.client().close()
        yield made


@pytest.fixture
def bus(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PVRD_BUS", daemon.address)


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PVRD_BUS", f"unix:path={tmp_path}/none")


@pytest.mark.parametrize("name", ["PvrdUpscale", "PvrdText"])
def test_the_contract(nodes: Any, nobody: None, name: str) -> None:
    node = nodes.NODE_CLASS_MAPPINGS[name]
    assert nodes.NODE_DISPLAY_NAME_MAPPINGS[name]
    assert isinstance(node.CATEGORY, str)
    assert set(node.RETURN_TYPES) <= TYPES
    assert len(node.RETURN_NAMES) == len(node.RETURN_TYPES)
    method = getattr(node(), node.FUNCTION)
    inputs = node.INPUT_TYPES()
    assert set(inputs) <= {"required", "optional", "hidden"}
    names = [n for part in inputs.values() for n in part]
    code = method.__func__.__code__
    assert set(names) == set(code.co_varnames[1 : code.co_argcount])
    for part in inputs.values():
        for kind, *more in part.values():
            assert isinstance(kind, list) or kind in TYPES
            settings = more[0] if more else {}
            if isinstance(kind, list):
                assert settings["default"] in kind, "a menu begins with what it has"
            elif "min" in settings:
                assert settings["min"] <= settings["default"] <= settings["max"]


@pytest.mark.bus
def test_menus_show_what_pvrd_has(nodes: Any, bus: None, run: Any) -> None:
    shown = nodes.NODE_CLASS_MAPPINGS
    assert "tiny" in run(shown["PvrdText"].INPUT_TYPES)["required"]["model"][0]
    assert "nsr-fast" in run(shown["PvrdUpscale"].INPUT_TYPES)["required"]["model"][0]


@pytest.mark.bus
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_batch_is_enlarged(nodes: Any, comfy: Comfy, bus: None, channels: int) -> None:
    truth = np.stack([scene(64, 96, seed) for seed in range(channels)], -1) / 255
    small = truth.reshape(32, 2, 48, 2, channels).mean((1, 3)).astype(np.float32)
    batch = np.stack([small, small[::-1, ::-1]])
    node = nodes.NODE_CLASS_MAPPINGS["PvrdUpscale"]()
    (made,) = node.upscale(Tensor(batch), 2.0, "balanced")
    assert isinstance(made, Tensor)
    assert made.shape == (2, 64, 96, channels)
    assert made.values.dtype == np.float32
    assert made.values.min() >= 0
    assert made.values.max() <= 1
    assert (comfy.steps, comfy.total) == ((4, 4) if channels == 4 else (2, 2))
    grey = small[..., :3].mean(-1)
    cubic = plain.enlarge(np.rint(grey * 65535).astype(np.uint16), 0, 0, 32, 48, 16) / 65535
    wanted = 255 * truth[..., :3].mean(-1)
    got = 255 * made.values[0][..., :3].mean(-1)
    assert psnr(got, wanted) > psnr(255 * cubic, wanted), "better than bicubic"
    assert psnr(255 * made.values[1], 255 * truth[::-1, ::-1]) > 25, "each in its place"
    if channels == 3:
        (plain_array,) = node.upscale(batch, 1.5, "fast", device="cpu", priority=0)
        assert isinstance(plain_array, np.ndarray)
        assert plain_array.shape == (2, 48, 72, 3)


@pytest.mark.bus
def test_colours_stay(nodes: Any, comfy: Comfy, bus: None, run: Any) -> None:
    """Even areas come back as they were, small pictures and large."""
    colours = np.array([[1, 0, 0], [0, 1, 0], [0.2, 0.4, 0.9], [0.5, 0.5, 0.5]], np.float32)
    node = nodes.NODE_CLASS_MAPPINGS["PvrdUpscale"]()
    for rows in (12, 720):
        batch = np.broadcast_to(colours[:, None, None], (4, rows, 16, 3))
        (made,) = run(node.upscale, Tensor(batch), 2.0, "fast")
        assert np.abs(made.values - colours[:, None, None]).max() < 0.02


@pytest.mark.bus
def test_text(nodes: Any, comfy: Comfy, bus: None, run: Any) -> None:
    node = nodes.NODE_CLASS_MAPPINGS["PvrdText"]()
    (first,) = run(node.write, PROMPT, "default", 8, 0.0, 1)
    assert first
    assert (comfy.steps, comfy.total) == (8, 8)
    assert node.write(PROMPT, "tiny", 8, 0.0, 2, system="Be short.") != (first,)
    comfy.cancel_at = 3
    with pytest.raises(Interrupted):
        run(node.write, PROMPT, "tiny", 100, 0.0, 1)


@pytest.mark.bus
def test_cancelling_ends_the_session(nodes: Any, comfy: Comfy, bus: None, daemon: Daemon) -> None:
    comfy.cancel_at = 1
    batch = np.zeros((8, 16, 16, 3), np.float32)
    with pytest.raises(Interrupted):
        nodes.NODE_CLASS_MAPPINGS["PvrdUpscale"]().upscale(Tensor(batch), 2.0, "fast")
    assert comfy.steps == 1
    with daemon.client() as client:
        assert client.statistics()["sessions"] == 0


def test_faults_are_sentences(nodes: Any, comfy: Comfy, nobody: None) -> None:
    node = nodes.NODE_CLASS_MAPPINGS["PvrdUpscale"]()
    with pytest.raises(NoDaemon, match="no daemon to talk to"):
        node.upscale(np.zeros((1, 4, 4, 3), np.float32), 2.0, "fast")
    for shape in ((4, 4, 3), (1, 4, 4, 2), (0, 4, 4, 3)):
        with pytest.raises(ValueError, match="IMAGE is"):
            node.upscale(np.zeros(shape, np.float32), 2.0, "fast")


@pytest.mark.bus
def test_what_pvrd_refuses_is_told(nodes: Any, comfy: Comfy, bus: None) -> None:
    node = nodes.NODE_CLASS_MAPPINGS["PvrdUpscale"]()
    with pytest.raises(PvrdError, match="no-such"):
        node.upscale(np.zeros((1, 4, 4, 3), np.float32), 2.0, "no-such")


@pytest.mark.parametrize("linked", [True, False])
def test_the_client_comes_with_a_link(folder: Path, tmp_path: Path, linked: bool) -> None:
    """A Python with what requirements.txt names, and without pvrd."""
    site = tmp_path / "site"
    site.mkdir()
    wanted = (ROOT / "integrations/comfyui/requirements.txt").read_text().split()
    for name in [each.replace("-", "_") for each in wanted]:
        (site / name).symlink_to(Path(str(__import__(name).__file__)).parent)
        for libraries in Path(str(__import__(name).__file__)).parents[1].glob(f"{name}.libs"):
            (site / libraries.name).symlink_to(libraries)
    if not linked:
        folder = Path(shutil.copytree(ROOT / "integrations/comfyui", tmp_path / "comfyui-pvrd"))
    program = (
        f"{LOADER}\nimport sys; sys.path.append(sys.argv[1]); load(sys.argv[2])\n"
        "from pvrd.client import Client\n"
        "assert not {'engine', 'systemd', 'tests'} & set(sys.modules)\n"
        "print([n for n in ('engine', 'tests') if __import__('importlib.util').util.find_spec(n)])"
    )
    done = subprocess.run(
        [sys.executable, "-ISBc", program, site, folder],
        cwd=tmp_path, env={**os.environ, "PVRD_BUS": "unix:path=/none"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if linked:
        assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    else:
        assert "the Python package pvrd is missing" in done.stderr
