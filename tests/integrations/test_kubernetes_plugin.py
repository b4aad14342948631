# SPDX-License-Identifier: Apache-2.0
"""The device plugin before a fake kubelet, with pods that run pvrctl against a real pvrd."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pvrd.client import Client, NoDaemon
from pvrd.errors import StartError
from pvrd.kubernetes import api
from pvrd.kubernetes.__main__ import resources
from tests.buses import ROOT, until
from tests.daemons import PROMPT, Daemon, write_tiny
from tests.integrations.fake_kubelet import FakeKubelet

CONFIG = {"models.text": "tiny", "gpu.enabled": False, "sensors.system": False}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node")
    for name in ("models", "kubelet", "pvrd"):
        (folder / name).mkdir()
    write_tiny(folder / "models")
    return folder


@contextmanager
def running(place: Path, address: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """The plugin as a program."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pvrd.kubernetes", "--bus", address, *more]
    command += ["--kubelet", str(place / "kubelet"), "--pods", str(place / "pods")]
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            assert process.stderr is not None
            said = process.stderr.read()
            process.wait(20)
        assert "Traceback" not in said, said


class Pod:
    """A stand-in for a container: its environment, and its mount where it lies on the node."""

    def __init__(self, given: Any) -> None:
        (mount,) = given.mounts
        assert mount.read_only
        self.folder = Path(mount.host_path)
        self.env = dict(given.envs)
        bus = self.env["PVRD_BUS"].replace(mount.container_path, mount.host_path)
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), **self.env, "PVRD_BUS": bus}

    def pvrctl(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pvrd.ctl.main", *map(str, arguments)],
            env=self._env, capture_output=True, text=True, check=False,
        )  # fmt: skip


def test_messages_are_those_of_the_published_api() -> None:
    """By hand, from the numbers in k8s.io/kubelet's api.proto."""
    register = api.message("RegisterRequest")(
        version="v1beta1", endpoint="e", resource_name="r",
        options={"get_preferred_allocation_available": True},
    )  # fmt: skip
    assert register.SerializeToString() == b"\x0a\x07v1beta1\x12\x01e\x1a\x01r\x22\x02\x10\x01"
    listed = api.message("ListAndWatchResponse")(
        devices=[{"ID": "d", "health": "Healthy", "topology": {"nodes": [{"ID": 1}]}}]
    )
    device = b"\x0a\x01d\x12\x07Healthy\x1a\x04\x0a\x02\x08\x01"
    assert listed.SerializeToString() == b"\x0a" + bytes([len(device)]) + device
    given = api.message("AllocateResponse")(
        container_responses=[
            {"envs": {"A": "b"}, "mounts": [{"container_path": "/c", "read_only": True}]}
        ]
    )
    container = b"\x0a\x06\x0a\x01A\x12\x01b\x12\x06\x0a\x02/c\x18\x01"
    assert given.SerializeToString() == b"\x0a" + bytes([len(container)]) + container
    prefer = api.message("PreferredAllocationRequest").FromString(
        b"\x0a\x08\x0a\x01a\x12\x01b\x18\x02"
    )
    (asked,) = prefer.container_requests
    assert (asked.available_deviceIDs, asked.must_include_deviceIDs) == (["a"], ["b"])
    assert asked.allocation_size == 2


def test_resources_as_options_say() -> None:
    plain, batch = resources(["pvrd.org/gpu=2", "pvrd.org/gpu-batch=3,priority=1"])
    assert plain.ids == ["pvrd.org-gpu-0", "pvrd.org-gpu-1"]
    assert (plain.priority, plain.percent, plain.first) == (5, 20, 0)
    assert (batch.priority, batch.percent, batch.first) == (1, 20, 2)
    for wrong in (["gpu=1"], ["a/b"], ["a/b=0"], ["a/b=1,priority=12"], ["a/b=1", "a/b=1"]):
        with pytest.raises(StartError):
            resources(wrong)


def test_clients_do_not_say_who_they_are(tmp_path: Path) -> None:
    """A pod's UID is none that the bus on the node would believe; the proxy's it sees."""
    said = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "bus"))
        listener.listen(1)
        client = threading.Thread(target=lambda: said.append(refused(f"unix:path={tmp_path}/bus")))
        client.start()
        server, _ = listener.accept()
        with server:
            assert server.recv(100) == b"\0AUTH EXTERNAL\r\n"
            server.sendall(b"DATA\r\n")
            assert server.recv(100) == b"DATA\r\n"
            server.sendall(b"REJECTED EXTERNAL\r\n")
            client.join(30)
    assert "it refuses our user" in said[0]


def refused(address: str) -> str:
    with pytest.raises(NoDaemon) as caught:
        Client(address)
    return str(caught.value)


@pytest.mark.bus
def test_pods_get_a_pvrd_of_their_own(place: Path) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(place / "pvrd", place / "models", CONFIG))
        daemon.client().close()
        kubelet = stack.enter_context(closing(FakeKubelet(place / "kubelet")))
        more = ["--cpu", "--resource", "pvrd.org/gpu=4,priority=7"]
        stack.enter_context(running(place, daemon.address, *more))
        plugin = stack.enter_context(closing(kubelet.plugin()))
        assert plugin.resource == "pvrd.org/gpu"
        assert plugin.request.options.get_preferred_allocation_available
        empty = plugin.call("GetDevicePluginOptions", "Empty", "DevicePluginOptions")
        assert empty == plugin.request.options
        shares = plugin.until(api.HEALTHY)
        assert len(shares) == 4
        assert plugin.prefer(shares[::-1], [shares[2]], 2) == [shares[2], shares[0]]

        one = Pod(plugin.allocate(shares[0]))
        two = Pod(plugin.allocate(shares[1], shares[2]))
        assert (one.env["PVRD_SHARE"], two.env["PVRD_SHARE"]) == ("25", "50")
        assert one.env["PVRD_PRIORITY"] == "7"
        assert stat.S_ISSOCK((one.folder / "bus").stat().st_mode)
        work(one, two)
        with pytest.raises(grpc.RpcError, match="has no share"):
            plugin.allocate("pvrd.org-gpu-9")

        # The share goes to another pod: who had it loses it, others do not.
        three = Pod(plugin.allocate(shares[0]))
        assert not one.folder.exists()
        assert one.pvrctl("models").returncode == 3
        for pod in (two, three):
            assert pod.pvrctl("models").returncode == 0


def work(one: Pod, two: Pod) -> None:
    """What a client needs is there, what belongs to the node is not."""
    asked = ["generate", "--max-tokens", "6", "--priority", one.env["PVRD_PRIORITY"]]
    answers = [pod.pvrctl(*asked, "--share", "10", PROMPT) for pod in (one, two)]
    assert [a.returncode for a in answers] == [0, 0], answers
    assert answers[0].stdout == answers[1].stdout != ""
    picture = one.folder.parent / "small.png"
    from PIL import Image

    Image.new("RGB", (16, 12), (200, 30, 30)).save(picture)
    done = one.pvrctl("upscale", "--model", "fast", picture, picture.with_name("large.png"))
    assert done.returncode == 0, done.stderr
    with Image.open(picture.with_name("large.png")) as large:
        assert large.size == (32, 24)
    for refused in (["config", "video.tile", "64"], ["hold"], ["models", "remove", "tiny"]):
        said = one.pvrctl(*refused)
        assert said.returncode not in (0, 3), said
        assert "Traceback" not in said.stderr
    bus = json.loads(one.pvrctl("--json", "status").stdout or "{}")
    assert bus.get("state") == "cpu" or bus


@pytest.mark.bus
def test_health_follows_pvrd_and_pods_outlive_the_plugin(place: Path) -> None:
    with ExitStack() as stack:
        kubelet = stack.enter_context(closing(FakeKubelet(place / "kubelet")))
        (place / "second").mkdir()
        daemon = Daemon(place / "second", place / "models", CONFIG)
        with running(place, daemon.address, "--cpu"), closing(kubelet.plugin()) as plugin:
            assert set(plugin.devices().values()) == {api.UNHEALTHY}, "there is no bus"
            with daemon:
                share = plugin.until(api.HEALTHY)[0]
                pod = Pod(plugin.allocate(share))
                assert pod.pvrctl("models").returncode == 0
            plugin.until(api.UNHEALTHY)
        assert pod.pvrctl("models").returncode == 3
        with daemon, running(place, daemon.address):
            after = stack.enter_context(closing(kubelet.plugin()))
            # A pvrd without a GPU is not healthy unless --cpu says so; pods that run stay served.
            assert set(after.devices().values()) == {api.UNHEALTHY}
            until(lambda: pod.pvrctl("models").returncode == 0, "the pod's socket")


def test_kubelet_comes_anew(place: Path) -> None:
    more = ["--resource", "a.b/c=1", "--resource", "a.b/d=1"]
    with ExitStack() as stack:
        first = stack.enter_context(closing(FakeKubelet(place / "kubelet")))
        stack.enter_context(running(place, f"unix:path={place}/nowhere", *more))
        names = {first.registered.get(timeout=30).resource_name for _ in range(2)}
        first.close()
        second = stack.enter_context(closing(FakeKubelet(place / "kubelet")))
        again = [stack.enter_context(closing(second.plugin())) for _ in range(2)]
        for plugin in again:
            assert set(plugin.devices().values()) == {api.UNHEALTHY}
        assert names == {plugin.resource for plugin in again} == {"a.b/c", "a.b/d"}


def test_kubelet_refuses(place: Path) -> None:
    command = [sys.executable, "-m", "pvrd.kubernetes", "--bus", "unix:path=/none"]
    command += ["--pods", str(place / "pods"), "--kubelet"]
    env = {**os.environ}
    with closing(FakeKubelet(place / "kubelet", refuse="no such version")):
        done = subprocess.run(
            [*command, str(place / "kubelet")],
            env=env, cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert "kubelet does not take pvrd.org/gpu: no such version" in done.stderr
    assert "Traceback" not in done.stderr
    done = subprocess.run(
        [*command, str(place / "none")],
        env=env, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
