# SPDX-License-Identifier: Apache-2.0
"""kubelet's device plugin API, v1beta1: names and numbers of its messages, as published in
k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto. The classes are made of this table, so no
compiler of protobuf's takes part and no generated code has to fit the installed version.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

VERSION = "v1beta1"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
FOLDER = "/var/lib/kubelet/device-plugins"
KUBELET = "kubelet.sock"
REGISTRATION = "v1beta1.Registration"
PLUGIN = "v1beta1.DevicePlugin"

# Message -> its fields in the order of their numbers: name and type, `*` for several, `map` for
# texts by texts.
_MESSAGES: dict[str, tuple[str, ...]] = {
    "DevicePluginOptions": ("pre_start_required bool", "get_preferred_allocation_available bool"),
    "RegisterRequest": (
        "version string",
        "endpoint string",
        "resource_name string",
        "options DevicePluginOptions",
    ),
    "Empty": (),
    "ListAndWatchResponse": ("devices Device*",),
    "TopologyInfo": ("nodes NUMANode*",),
    "NUMANode": ("ID int64",),
    "Device": ("ID string", "health string", "topology TopologyInfo"),
    "PreStartContainerRequest": ("devices_ids string*",),
    "PreStartContainerResponse": (),
    "PreferredAllocationRequest": ("container_requests ContainerPreferredAllocationRequest*",),
    "ContainerPreferredAllocationRequest": (
        "available_deviceIDs string*",
        "must_include_deviceIDs string*",
        "allocation_size int32",
    ),
    "PreferredAllocationResponse": ("container_responses ContainerPreferredAllocationResponse*",),
    "ContainerPreferredAllocationResponse": ("deviceIDs string*",),
    "AllocateRequest": ("container_requests ContainerAllocateRequest*",),
    "ContainerAllocateRequest": ("devices_ids string*",),
    "CDIDevice": ("name string",),
    "AllocateResponse": ("container_responses ContainerAllocateResponse*",),
    "ContainerAllocateResponse": (
        "envs map",
        "mounts Mount*",
        "devices DeviceSpec*",
        "annotations map",
        "cdi_devices CDIDevice*",
    ),
    "Mount": ("container_path string", "host_path string", "read_only bool"),
    "DeviceSpec": ("container_path string", "host_path string", "permissions string"),
}
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
}


def _field(message: Any, number: int, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    if kind.endswith("*") or kind == "map":
        field.label = _FIELD.LABEL_REPEATED
        kind = kind.removesuffix("*")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _FIELD.TYPE_MESSAGE
    if kind == "map":  # on the wire repeated pairs
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        for at, part in enumerate(("key", "value"), 1):
            _field(entry, at, part, "string")
        kind = f"{message.name}.{entry.name}"
    field.type_name = f".{VERSION}.{kind}"


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="pvrd/deviceplugin.proto", package=VERSION, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields, 1):
            _field(message, number, *text.split())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{VERSION}.{name}"))
        for name in _MESSAGES
    }


_MADE = _classes()


def message(name: str) -> Any:
    """The class of a message."""
    return _MADE[name]
