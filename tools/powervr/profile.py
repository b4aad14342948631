# SPDX-License-Identifier: Apache-2.0
"""What a core's driver says, in the words of the engine: profiles/<core>.json.

A profile is {"name", "driver", "limits", "features", "queried"}: `limits` has the keys of
engine.backends.base.Limits, `features` the names of DeviceInfo.features, `queried` the driver's own
words, without what depends on the machine that asked. The engine's profile of the same name
(engine/backends/profiles) is kept with the same limits and features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.backends import profiles
from engine.backends.base import Limits
from engine.backends.devices import SUBGROUP_FEATURES

# The engine's own names of features; importing them needs no Vulkan.
from engine.backends.vulkan.features import CORE, INT_DOT, VULKAN_11, VULKAN_12

FOLDER = Path(__file__).resolve().parent / "profiles"
_STAGE_COMPUTE = 0x20


def limits(queried: Mapping[str, Any]) -> Limits:
    """The engine's limits, as its Vulkan backend reads them off a device."""
    q = queried
    subgroups = q["subgroupSupportedStages"] & _STAGE_COMPUTE
    return Limits(
        max_workgroup_invocations=q["maxComputeWorkGroupInvocations"],
        max_workgroup_size=tuple(q["maxComputeWorkGroupSize"]),
        max_workgroup_count=tuple(q["maxComputeWorkGroupCount"]),
        max_shared_bytes=q["maxComputeSharedMemorySize"],
        max_storage_buffers=min(
            q["maxPerStageDescriptorStorageBuffers"], q["maxDescriptorSetStorageBuffers"]
        ),
        max_push_bytes=q["maxPushConstantsSize"],
        max_storage_range=q["maxStorageBufferRange"],
        max_uniform_range=q["maxUniformBufferRange"],
        storage_align=q["minStorageBufferOffsetAlignment"],
        subgroup_size=q["subgroupSize"] if subgroups else 1,
    )


def features(queried: Mapping[str, Any]) -> frozenset[str]:
    """The engine's names of the features that are there."""
    known = CORE | VULKAN_11 | VULKAN_12 | INT_DOT
    have = {name for field, name in known.items() if queried[field]}
    if queried["subgroupSupportedStages"] & _STAGE_COMPUTE:
        bits = queried["subgroupSupportedOperations"]
        have |= {name for i, name in enumerate(SUBGROUP_FEATURES) if bits >> i & 1}
    return frozenset(have)


def limits_of(made: Mapping[str, Any]) -> Limits:
    """The limits in a profile."""
    sizes: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in made["limits"].items()
    }
    return Limits(**sizes)


def make(core: str, queried: Mapping[str, Any]) -> dict[str, Any]:
    """The profile of a core from the answer of `probe info`."""
    return {
        "name": core,
        "driver": f"{queried['driverName']} {queried['driverInfo']}",
        "limits": json.loads(json.dumps(asdict(limits(queried)))),
        "features": sorted(features(queried)),
        "queried": {k: v for k, v in queried.items() if k != "maxMemoryAllocationSize"},
    }


def kept(core: str) -> dict[str, Any] | None:
    """The profile in the tree, None if there is none."""
    file = FOLDER / f"{core}.json"
    if not file.is_file():
        return None
    found = json.loads(file.read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def keep(profile: Mapping[str, Any]) -> None:
    """Writes a profile into the tree, and the engine's with the same limits and features."""
    name = f"{profile['name']}.json"
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / name).write_text(json.dumps(profile, indent=2) + "\n")
    file = profiles.FOLDER / name
    words = json.loads(file.read_text("utf-8")) if file.is_file() else {"about": profile["name"]}
    words |= {
        "name": profile["name"],
        "source": f"asked of the driver ({profile['driver']}) by `make powervr`",
        "limits": profile["limits"],
        "features": profile["features"],
    }
    file.write_text(json.dumps(words, indent=2) + "\n")


def differences(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[str]:
    """What changed in what the engine goes by, in words."""
    if old is None:
        return [f"{new['name']}: there is no profile in the tree"]
    out = []
    for key, value in new["limits"].items():
        if old["limits"].get(key) != value:
            out.append(f"{new['name']}: {key} was {old['limits'].get(key)}, is {value}")
    for name in sorted(set(old["features"]) ^ set(new["features"])):
        word = "gone" if name in old["features"] else "new"
        out.append(f"{new['name']}: the feature {name} is {word}")
    return out
