# SPDX-License-Identifier: Apache-2.0
"""kubelet as a device plugin sees it: Registration on kubelet.sock, and a client of what registers.
After the published v1beta1 API and kubelet's device manager."""

from __future__ import annotations

import queue
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from pvrd.kubernetes import api

WAIT_S = 30.0


class FakeKubelet:
    """Listens in `folder`; with `refuse` it answers every registration with this sentence."""

    def __init__(self, folder: Path, refuse: str = "") -> None:
        for old in folder.iterdir():
            old.unlink()  # as kubelet does when it starts
        self._folder, self._refuse = folder, refuse
        self.registered: queue.Queue[Any] = queue.Queue()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        handler = grpc.unary_unary_rpc_method_handler(
            self._register, api.message("RegisterRequest").FromString,
            api.message("Empty").SerializeToString,
        )  # fmt: skip
        generic = grpc.method_handlers_generic_handler(api.REGISTRATION, {"Register": handler})
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_insecure_port(f"unix://{folder / api.KUBELET}")
        self._server.start()

    def close(self) -> None:
        self._server.stop(0).wait()

    def _register(self, request: Any, context: Any) -> Any:
        if self._refuse:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._refuse)
        self.registered.put(request)
        return api.message("Empty")()

    def plugin(self) -> Plugin:
        """The next plugin that registers."""
        request = self.registered.get(timeout=WAIT_S)
        assert request.version == "v1beta1"
        assert "/" not in request.endpoint
        return Plugin(self._folder / request.endpoint, request)


class Plugin:
    """A registered plugin."""

    def __init__(self, path: Path, request: Any) -> None:
        self.request = request
        self.resource: str = request.resource_name
        self._channel = grpc.insecure_channel(f"unix://{path}")
        self._lists = self._channel.unary_stream(
            f"/{api.PLUGIN}/ListAndWatch", api.message("Empty").SerializeToString,
            api.message("ListAndWatchResponse").FromString,
        )(api.message("Empty")(), wait_for_ready=True)  # fmt: skip

    def call(self, method: str, request: str, reply: str, **values: Any) -> Any:
        made = self._channel.unary_unary(
            f"/{api.PLUGIN}/{method}", api.message(request).SerializeToString,
            api.message(reply).FromString,
        )  # fmt: skip
        return made(api.message(request)(**values), timeout=WAIT_S)

    def devices(self) -> dict[str, str]:
        """The next list: share -> health."""
        return {d.ID: d.health for d in next(self._lists).devices}

    def until(self, health: str) -> list[str]:
        """The shares, as soon as all are so."""
        while set((listed := self.devices()).values()) != {health}:
            pass
        return sorted(listed)

    def prefer(self, available: list[str], needed: list[str], size: int) -> list[str]:
        asked = {
            "available_deviceIDs": available, "must_include_deviceIDs": needed,
            "allocation_size": size,
        }  # fmt: skip
        found = self.call(
            "GetPreferredAllocation", "PreferredAllocationRequest", "PreferredAllocationResponse",
            container_requests=[asked],
        )  # fmt: skip
        return list(found.container_responses[0].deviceIDs)

    def allocate(self, *ids: str) -> Any:
        """What one container gets."""
        found = self.call(
            "Allocate", "AllocateRequest", "AllocateResponse",
            container_requests=[{"devices_ids": ids}],
        )  # fmt: skip
        return found.container_responses[0]

    def close(self) -> None:
        self._lists.cancel()
        self._channel.close()
