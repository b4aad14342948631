# SPDX-License-Identifier: Apache-2.0
"""What is asked of a driver about its features, with a driver of paper."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from engine.backends.vulkan import api, features
from engine.backends.vulkan.api import device as opening
from engine.errors import PvrError

HALVES = {"MSize": 16, "NSize": 16, "KSize": 16, "AType": 0, "BType": 0, "CType": 1}
HALVES |= {"ResultType": 1, "scope": 3}
EXTENSIONS = [features.INT_DOT_EXTENSION, features.COOPMAT_EXTENSION]


class Paper:
    """As much of the package `vulkan` as is asked here: a driver with these extensions, fields of
    features that are true, and shapes of matrices.
    """

    VK_SHADER_STAGE_COMPUTE_BIT = 32
    VK_COMPONENT_TYPE_FLOAT16_KHR, VK_COMPONENT_TYPE_FLOAT32_KHR, VK_SCOPE_SUBGROUP_KHR = 0, 1, 3

    class ProcedureNotFoundError(Exception):
        pass

    class ExtensionNotSupportedError(Exception):
        pass

    def __init__(self, extensions: list[str], fields: set[str], shapes: list[dict[str, int]]):
        self.extensions, self.fields, self.shapes, self.stages = extensions, fields, shapes, 32
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def make(**given: Any) -> Any:
            self.asked.append(name)
            return Namespace(name=name, **{"pNext": None, **given})

        return make

    def vkEnumerateDeviceExtensionProperties(self, pd: Any, layer: Any) -> list[Any]:
        return [Namespace(extensionName=name) for name in self.extensions]

    def vkGetPhysicalDeviceFeatures2(self, pd: Any, core: Any) -> None:
        core.features = Namespace()
        for struct in (core.features, *chain(core)):
            for field in (*features.CORE, *features.VULKAN_11, *features.VULKAN_12):
                setattr(struct, field, field in self.fields)
            for field in (*features.INT_DOT, *features.COOPMAT):
                setattr(struct, field, field in self.fields)

    def vkGetPhysicalDeviceProperties2(self, pd: Any, properties: Any) -> None:
        properties.pNext.cooperativeMatrixSupportedStages = self.stages

    def vkGetInstanceProcAddr(self, instance: Any, name: str) -> Callable[..., Any]:
        if not self.shapes:
            raise self.ProcedureNotFoundError
        return lambda pd: [Namespace(**shape) for shape in self.shapes]


def chain(head: Any) -> list[Any]:
    out = []
    while (head := head.pNext) is not None:
        out.append(head)
    return out


def supported(vk: Paper, subgroup: int = 32) -> frozenset[str]:
    return features.supported(vk, lambda what, f, *a: f(*a), None, None, subgroup)


def test_extensions_that_are_not_there_are_not_asked_about() -> None:
    vk = Paper([], {"shaderFloat16", "shaderIntegerDotProduct", "cooperativeMatrix"}, [HALVES])
    assert supported(vk) == {"fp16"}
    assert not any("Dot" in name or "Cooperative" in name for name in vk.asked)


def test_only_what_is_there_and_allowed_is_turned_on() -> None:
    fields = {"shaderInt16", "shaderFloat16", "bufferDeviceAddress", "shaderIntegerDotProduct"}
    vk = Paper(EXTENSIONS, fields, [])
    found = features.query(vk, lambda what, f, *a: f(*a), None, {"fp16", "int_dot", "magic"})
    assert found.names == {"fp16", "int_dot"}
    assert found.extensions == (features.INT_DOT_EXTENSION,)
    on = [
        {k: v for k, v in vars(s).items() if k not in ("name", "pNext")} for s in chain(found.head)
    ]
    assert on == [{"shaderIntegerDotProduct": 1}, {"shaderFloat16": 1}]


@pytest.mark.parametrize(
    ("change", "stages", "subgroup", "there"),
    [
        ({}, 32, 32, True),
        ({}, 16, 32, False),
        ({}, 32, 64, False),
        ({"MSize": 8}, 32, 32, False),
        ({"CType": 0}, 32, 32, False),
        ({"scope": 2}, 32, 32, False),
    ],
)
def test_matrices_have_to_be_of_the_size_that_kernels_use(
    change: dict[str, int], stages: int, subgroup: int, there: bool
) -> None:
    vk = Paper(EXTENSIONS, {"cooperativeMatrix"}, [{**HALVES, "KSize": 8}, {**HALVES, **change}])
    vk.stages = stages
    assert supported(vk, subgroup) == ({"coopmat"} if there else set())
    vk.shapes = []
    assert supported(vk) == set()


def test_the_paper_has_the_packages_own_numbers() -> None:
    for name in vars(Paper):
        if name.startswith("VK_"):
            assert getattr(api.vk, name) == getattr(Paper, name)


def _call(what: str, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@pytest.mark.parametrize(
    ("extensions", "found"),
    [
        ([], ""),
        (["VK_EXT_global_priority"], "VK_EXT_global_priority"),
        (["VK_EXT_global_priority", "VK_KHR_global_priority"], "VK_KHR_global_priority"),
    ],
)
def test_global_priority_by_either_name(extensions: list[str], found: str) -> None:
    assert features.priority_extension(Paper(extensions, set(), []), _call, None) == found


@pytest.mark.parametrize("refused", [False, True])
def test_the_queue_is_low_where_the_driver_lets_it(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper = Paper(["VK_KHR_global_priority"], set(), [])
    made: list[Any] = []

    def create(pd: Any, info: Any, allocator: Any) -> str:
        made.append(info)
        if refused and info.ppEnabledExtensionNames:
            raise PvrError("not permitted")
        return "device"

    paper.vkCreateDevice = create  # type: ignore[attr-defined]
    paper.VK_QUEUE_GLOBAL_PRIORITY_LOW_KHR = 128  # type: ignore[attr-defined]
    monkeypatch.setattr(opening, "vk", paper)
    monkeypatch.setattr(opening, "call", _call)
    device = api.Device.__new__(api.Device)
    device.info = Namespace(features=frozenset())  # type: ignore[assignment]
    device.low = False
    assert device._create(None, 0) == "device"
    assert device.low is not refused
    queue = made[0].pQueueCreateInfos[0]
    assert queue.pNext.globalPriority == 128
    assert made[0].ppEnabledExtensionNames == ["VK_KHR_global_priority"]
    if refused:
        assert made[1].pQueueCreateInfos[0].pNext is None
        assert made[1].ppEnabledExtensionNames == []
