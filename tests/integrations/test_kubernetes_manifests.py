# SPDX-License-Identifier: Apache-2.0
"""The manifests by Kubernetes' own schemas, and the Job's script as its pods run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pvrd.kubernetes.__main__ import resources
from tests.buses import ROOT
from tests.daemons import Daemon

FOLDER = ROOT / "integrations/kubernetes"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def job() -> dict[str, Any]:
    found: dict[str, Any] = documents("enlarge-clips.yaml")[1]
    return found


def plugin() -> dict[str, Any]:
    (made,) = documents("device-plugin.yaml")
    found: dict[str, Any] = made["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.mark.parametrize("name", ["device-plugin.yaml", "enlarge-clips.yaml"])
def test_a_manifest_is_by_the_schema(name: str) -> None:
    version = kubernetes_validate.latest_version()
    for document in documents(name):
        kubernetes_validate.validate(document, version, strict=True)


def test_what_the_job_asks_for_the_plugin_offers() -> None:
    asked = [c.removeprefix("--resource=") for c in plugin()["command"] if "--resource=" in c]
    offered = {resource.name: resource for resource in resources(asked)}
    limits = job()["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    (wanted,) = [name for name in limits if name.startswith("pvrd.org/")]
    assert wanted in offered
    first = int(next(c for c in plugin()["command"] if c.startswith("--uids=")).partition("=")[2])
    users = re.findall(r"^u \S+ (\d+)", (FOLDER / "pvrd-pods.sysusers.conf").read_text(), re.M)
    last = max(r.first + r.shares for r in offered.values())
    assert [int(u) for u in users] == list(range(first, first + last))


def test_the_job_is_whole() -> None:
    spec = job()["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    env = {e["name"]: e for e in container["env"]}
    assert env["JOB_COMPLETIONS"]["value"] == str(spec["completions"])
    annotations = spec["template"]["metadata"]["annotations"]
    for name in ("PVRD_MODEL", "PVRD_ASKED"):
        path = env[name]["valueFrom"]["fieldRef"]["fieldPath"]
        assert re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
        assert path.split("'")[1] in annotations


@pytest.mark.bus
def test_the_jobs_pods_enlarge_a_folder_of_clips(tmp_path: Path) -> None:
    """Three clips, two pods: each clip once, sound and all; what is there is left alone."""
    script = tmp_path / "enlarge.sh"
    script.write_text(documents("enlarge-clips.yaml")[0]["data"]["enlarge.sh"])
    tools = tmp_path / "bin"
    for folder in ("bin", "clips", "large", "models"):
        (tmp_path / folder).mkdir()
    (tools / "pvrctl").write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m pvrd.ctl.main "$@"\n'
    )
    (tools / "pvrctl").chmod(0o755)
    for name in ("a b.mkv", "c.mkv", "d.mkv"):
        subprocess.run(
            ["ffmpeg", "-v", "error", "-f", "lavfi", "-i", "testsrc=s=64x48:r=5:d=1", "-f",
             "lavfi", "-i", "sine=d=1", "-shortest", str(tmp_path / "clips" / name)],
            check=True,
        )  # fmt: skip
    with ExitStack() as stack:
        config = {"gpu.enabled": False, "sensors.system": False}
        daemon = stack.enter_context(Daemon(tmp_path, tmp_path / "models", config))
        daemon.client().close()
        env = {
            **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PVRD_BUS": daemon.address,
            "CLIPS": str(tmp_path / "clips"), "LARGE": str(tmp_path / "large"),
            "JOB_COMPLETIONS": "2", "PVRD_MODEL": "fast", "PVRD_SHARE": "12", "PVRD_PRIORITY": "1",
        }  # fmt: skip
        made: list[list[str]] = []
        for index in ("0", "1", "1"):
            done = subprocess.run(
                ["bash", str(script)], env={**env, "JOB_COMPLETION_INDEX": index},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            made.append([Path(line).name for line in done.stdout.splitlines()])
    assert made == [["a b.mkv", "d.mkv"], ["c.mkv"], []]
    streams = subprocess.run(
        ["ffprobe", "-v", "error", "-show_entries", "stream=codec_type,width,height", "-of",
         "csv=p=0", str(tmp_path / "large/a b.mkv")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert streams.stdout.split() == ["video,128,96", "audio"]
