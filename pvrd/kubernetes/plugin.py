# SPDX-License-Identifier: Apache-2.0
"""One resource of the node: the DevicePlugin service, and its registration with kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pvrd import systemd
from pvrd.errors import StartError
from pvrd.kubernetes import api
from pvrd.kubernetes.health import Health
from pvrd.kubernetes.pods import SOCKET, Pods

LOOK_S = 1.0  # between two looks whether kubelet has come anew
IN_POD = "/run/pvrd-pod"
_TIMEOUT_S = 10.0
_AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


@dataclass(frozen=True)
class Resource:
    """What pods ask for: `shares` of the GPU under a name, each of `percent` of its time; their
    work has this priority. `first`: number of its first share among all resources'."""

    name: str
    shares: int
    priority: int
    percent: int
    first: int

    @property
    def short(self) -> str:
        """The name as part of a file's name."""
        return self.name.replace("/", "-")

    @property
    def ids(self) -> list[str]:
        """The shares as kubelet knows them."""
        return [f"{self.short}-{n}" for n in range(self.shares)]


class Plugin:
    """Serves one resource until it is cancelled."""

    def __init__(self, resource: Resource, pods: Pods, health: Health, folder: Path) -> None:
        """folder: kubelet's for device plugins."""
        self.resource = resource
        self._pods, self._health, self._folder = pods, health, folder
        self._endpoint = f"pvrd-{resource.short}.sock"
        self.registrations = 0

    async def run(self) -> None:
        """Serves, and registers each time that kubelet begins anew.

        Raises:
            StartError: kubelet refuses.
        """
        path = self._folder / self._endpoint
        while True:
            path.unlink(missing_ok=True)
            server = grpc.aio.server()
            server.add_generic_rpc_handlers((self._handlers(),))
            server.add_insecure_port(f"unix://{path}")
            await server.start()
            try:
                kubelet, own = self._inode(self._folder / api.KUBELET), self._inode(path)
                registered = await self._register()
                while registered:
                    await asyncio.sleep(LOOK_S)
                    self._pods.mend()
                    now = self._inode(self._folder / api.KUBELET)
                    # kubelet empties the folder when it starts; while it is away, it is waited for.
                    if now is not None and (now != kubelet or self._inode(path) != own):
                        break
            finally:
                await server.stop(0)
            if not registered:
                await asyncio.sleep(LOOK_S)

    @staticmethod
    def _inode(path: Path) -> tuple[int, int] | None:
        try:
            found = os.stat(path)
        except OSError:
            return None
        return found.st_ino, found.st_ctime_ns

    async def _register(self) -> bool:
        """False: kubelet is not there, or went meanwhile."""
        request = api.message("RegisterRequest")(
            version=api.VERSION,
            endpoint=self._endpoint,
            resource_name=self.resource.name,
            options=_options(),
        )
        async with grpc.aio.insecure_channel(f"unix://{self._folder / api.KUBELET}") as channel:
            call = channel.unary_unary(
                f"/{api.REGISTRATION}/Register",
                request_serializer=api.message("RegisterRequest").SerializeToString,
                response_deserializer=api.message("Empty").FromString,
            )
            try:
                await call(request, timeout=_TIMEOUT_S, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() in _AWAY:
                    return False
                text = f"kubelet does not take {self.resource.name}: {error.details()}"
                raise StartError(text) from error
        self.registrations += 1
        systemd.log(systemd.NOTICE, f"pvrd-device-plugin: {self.resource.name} is registered")
        return True

    def _handlers(self) -> Any:
        def unary(method: Any, request: str, reply: str) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                method, api.message(request).FromString, api.message(reply).SerializeToString
            )

        stream = grpc.unary_stream_rpc_method_handler(
            self._list_and_watch,
            api.message("Empty").FromString,
            api.message("ListAndWatchResponse").SerializeToString,
        )
        methods = {
            "GetDevicePluginOptions": unary(self._get_options, "Empty", "DevicePluginOptions"),
            "ListAndWatch": stream,
            "GetPreferredAllocation": unary(
                self._prefer, "PreferredAllocationRequest", "PreferredAllocationResponse"
            ),
            "Allocate": unary(self._allocate, "AllocateRequest", "AllocateResponse"),
            "PreStartContainer": unary(
                self._pre_start, "PreStartContainerRequest", "PreStartContainerResponse"
            ),
        }
        return grpc.method_handlers_generic_handler(api.PLUGIN, methods)

    async def _get_options(self, _request: Any, _context: Any) -> Any:
        return _options()

    async def _pre_start(self, _request: Any, _context: Any) -> Any:
        return api.message("PreStartContainerResponse")()

    async def _list_and_watch(self, _request: Any, _context: Any) -> AsyncIterator[Any]:
        device, told = api.message("Device"), None
        while True:
            async with self._health.changed:
                while self._health.healthy == told:
                    await self._health.changed.wait()
                told = self._health.healthy
            word = api.HEALTHY if told else api.UNHEALTHY
            listed = [device(ID=each, health=word) for each in self.resource.ids]
            yield api.message("ListAndWatchResponse")(devices=listed)

    async def _prefer(self, request: Any, _context: Any) -> Any:
        """All shares are of one GPU: the lowest numbers, so that the users in use are few."""
        made = []
        for asked in request.container_requests:
            needed = list(asked.must_include_deviceIDs)
            rest = sorted(set(asked.available_deviceIDs) - set(needed), key=self._number)
            chosen = (needed + rest)[: asked.allocation_size]
            made.append(api.message("ContainerPreferredAllocationResponse")(deviceIDs=chosen))
        return api.message("PreferredAllocationResponse")(container_responses=made)

    def _number(self, share: str) -> int:
        known = self.resource.ids
        return known.index(share) if share in known else len(known)

    async def _allocate(self, request: Any, context: Any) -> Any:
        made = []
        for asked in request.container_requests:
            ids = list(asked.devices_ids)
            if not ids or not set(ids) <= set(self.resource.ids):
                text = f"{self.resource.name} has no share {', '.join(ids) or 'without a name'}"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
            try:
                made.append(self._given(ids))
            except StartError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return api.message("AllocateResponse")(container_responses=made)

    def _given(self, ids: Iterable[str]) -> Any:
        listed = sorted(set(ids), key=self._number)
        folder = self._pods.give(listed, self.resource.first + self._number(listed[0]))
        return api.message("ContainerAllocateResponse")(
            envs={
                "PVRD_BUS": f"unix:path={IN_POD}/{SOCKET}",
                "PVRD_SHARE": str(min(100, self.resource.percent * len(listed))),
                "PVRD_PRIORITY": str(self.resource.priority),
            },
            mounts=[
                api.message("Mount")(container_path=IN_POD, host_path=str(folder), read_only=True)
            ],
        )


def _options() -> Any:
    return api.message("DevicePluginOptions")(get_preferred_allocation_available=True)


async def serve(plugins: Iterable[Plugin], health: Health) -> None:
    """Runs all of them until one fails or this is cancelled.

    Raises:
        StartError: kubelet refuses.
    """
    tasks = [asyncio.ensure_future(work) for work in (health.run(), *(p.run() for p in plugins))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
