# SPDX-License-Identifier: Apache-2.0
"""What the daemon knows of itself for a doctor: facts with remedies, and the list of devices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from pvrd import fds
from pvrd.bus import Variant
from pvrd.bus_values import V, variant
from pvrd.core import Core
from pvrd.model_folders import SILENT
from pvrd.models import describe
from pvrd.worker import Worker

LOOK_S = 10.0  # for what files tell
# Doctor's word for why there is no GPU -> how to mend it.
REMEDIES: Mapping[str, str] = {
    "no_render_node": "load the kernel's driver for the GPU (PowerVR: powervr) and its firmware",
    "no_permission": "let the user of pvrd open /dev/dri/renderD* (group render)",
    "no_icd": "install a Vulkan driver (on Debian and Ubuntu: mesa-vulkan-drivers)",
    "software_only": "only a software device is there; for tests: gpu.allow_software = true",
    "too_old": "install a newer Mesa or vendor driver",
    "non_conformant": "the driver is not conformant on this core; newer Mesa may help",
    "busy": "another process holds the GPU; end it, and pvrd takes the GPU within a minute",
    "failed": "the journal of the GPU worker has the reason",
}


def devices(workers: tuple[Worker, ...]) -> list[dict[str, Variant]]:
    """The property Devices."""
    return [_device(worker) for worker in workers]


def _device(worker: Worker) -> dict[str, Variant]:
    device = worker.device if worker.state in ("ready", "asleep") else None
    out = {
        "kind": V("s", worker.kind),
        "present": V("b", device is not None),
        "state": V("s", worker.state),
        "name": V("s", str((device or {}).get("name", ""))[:200]),
        "driver": V("s", str((device or {}).get("driver", ""))[:200]),
        "software": V("b", bool((device or {}).get("software", False))),
        "code": V("s", worker.code),
        "reason": V("s", worker.reason),
        "pid": V("u", worker.pid),
        "generation": V("u", worker.generation),
    }
    out["quarantined"] = V("a{ss}", worker.quarantined)
    for key in ("limits", "properties"):
        value = (device or {}).get(key)
        out[key] = variant(value) if isinstance(value, dict) else V("a{sv}", {})
    features = (device or {}).get("features")
    texts = [str(f) for f in features] if isinstance(features, (list, tuple)) else []
    out["features"] = V("as", sorted(texts))
    return out


def sensors(core: Core) -> Variant:
    """What GetStatistics says of the machine: rows of name, value, source and unit."""
    ratio = core.supervisor.gpu.canary_ratio(time.monotonic())
    source = "the GPU worker" if ratio is not None else "no slice ran on the GPU lately"
    value = "unknown" if ratio is None else ratio
    rows = [{"name": "canary", "value": value, "source": source, "unit": "times"}]
    rows += core.sensors.describe()
    typed = [{key: variant(value) for key, value in row.items()} for row in rows]
    return V("aa{sv}", typed)


def _fact(topic: str, status: str, message: str, code: str = "", remedy: str = "") -> Any:
    texts = {"topic": topic, "status": status, "code": code, "message": message, "remedy": remedy}
    return {key: V("s", value) for key, value in texts.items()}


async def facts(core: Core, version: str, bus: str) -> list[dict[str, Variant]]:
    """What GetDiagnostics answers."""
    out = [
        _fact("daemon", "ok", f"pvrd {version} runs, state {core.supervisor.state}"),
        _fact("bus", "ok", f"the name org.pvrd.Pvrd1 is owned on the {bus} bus"),
    ]
    out += [_worker_fact(worker) for worker in core.supervisor.workers]
    remedy = "another driver version, or another build of pvrd, is tested anew"
    for worker in core.supervisor.workers:
        for name, reason in worker.quarantined.items():
            text = f"the kernel {name} is not used: {reason}"
            out.append(_fact(worker.kind, "warning", text, "quarantined", remedy))
    out += await _looked(core)
    for warning in core.config.warnings:
        remedy = "correct or remove the key, then reload"
        out.append(_fact("config", "warning", warning, "unknown_key", remedy))
    if core.polkit.asks:
        if await core.polkit.available():
            out.append(_fact("polkit", "ok", "polkit decides about models and configuration"))
        else:
            text = "polkit does not answer: models, configuration and high priority are denied"
            out.append(_fact("polkit", "warning", text, "no_polkit", "install polkitd"))
    return out


async def _looked(core: Core) -> list[Any]:
    """What files tell, read beside the loop: a file system may not answer."""
    remedy = "see which file system that is: `cat /proc/mounts`"
    if core.looking is None or core.looking.done():
        core.looking = asyncio.ensure_future(fds.in_thread(lambda: _look(core)))
        core.looking.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        return await asyncio.wait_for(asyncio.shield(core.looking), LOOK_S)
    except TimeoutError:
        text = f"the files of models and configuration do not answer within {LOOK_S:g} s"
        return [_fact("models", "failed", text, "no_answer", remedy)]


def _look(core: Core) -> list[Any]:
    out = []
    models = describe(core.store)
    for kind in ("text", "video"):
        names = [m["name"] for m in models if m["kind"] == kind]
        if names:
            out.append(_fact("models", "ok", f"models for {kind}: {', '.join(names)}"))
        else:
            add = "add one: `pvrctl models add FILE`"
            out.append(_fact("models", "warning", f"no model for {kind}", "no_model", add))
    if fault := core.config_fault():
        text = f"an older configuration is in force, and pvrd would not start again: {fault}"
        out.append(_fact("config", "failed", text, "bad_config", "correct it, then reload"))
    return out + _named_in_vain(core)


def _named_in_vain(core: Core) -> list[Any]:
    """Of the configuration: models, folders and accounts that are not there."""
    out = []
    models = core.store.all()
    for kind in ("text", "video"):
        if wrong := core.store.wrong_default(models, kind):
            remedy = f"`pvrctl config set models.{kind}=NAME`; `pvrctl models` lists the names"
            out.append(_fact("models", "warning", wrong, "no_such_model", remedy))
    named = core.config.texts("models.paths")
    for folder, seen in core.store.seen().items():
        if seen.why == SILENT or (seen.why and folder in named):
            remedy = "name a folder that pvrd may read, from / on, then reload"
            if seen.why == SILENT:
                remedy = "look at its file system, a server's perhaps; its models come back with it"
            names = "models.paths names" if folder in named else "models lie in"
            text = f"{names} {folder}: {seen.why}"
            out.append(_fact("models", "warning", text, "no_folder", remedy))
    for account in core.polkit.unknown_accounts():
        text = f"access.accounts names {account}, which is no account here"
        remedy = "correct or remove it, then reload"
        out.append(_fact("config", "warning", text, "no_account", remedy))
    return out


def agent(well: bool, words: str) -> dict[str, Variant]:
    """What is known of the agents that watch compositors (pvrd/reports.py)."""
    remedy = "in a graphical session: `systemctl --user enable --now pvr-agent`; docs/neighbours.md"
    fact: dict[str, Variant] = _fact("agent", "ok" if well else "warning", words)
    return fact if well else {**fact, "code": V("s", "no_agent"), "remedy": V("s", remedy)}


def _worker_fact(worker: Worker) -> dict[str, Variant]:
    topic = worker.kind
    if worker.state == "ready":
        name = worker.name or "a device without a name"
        software = " (software)" if topic == "gpu" and (worker.device or {}).get("software") else ""
        note = f", {worker.counters.restarts} restarts" if worker.counters.restarts else ""
        fact = _fact(topic, "ok", f"{name}{software}{note}")
    elif worker.state in ("starting", "restarting"):
        fact = _fact(topic, "warning", f"{worker.state}: {worker.reason or 'not ready yet'}",
                     worker.state, "wait; the journal has the reason of each end")  # fmt: skip
    elif worker.state == "asleep":
        name = worker.name or "a device without a name"
        fact = _fact(topic, "ok", f"{name}, asleep: {worker.reason}", "asleep")
    elif worker.state == "disabled":
        remedy = "to use it: `pvrctl config set gpu.enabled=true`"
        fact = _fact(topic, "ok", worker.reason, "disabled", remedy)
    else:
        status = "warning" if topic == "gpu" else "failed"
        remedy = REMEDIES.get(worker.code, REMEDIES["failed"])
        fact = _fact(topic, status, worker.reason, worker.code or "failed", remedy)
    return fact  # type: ignore[no-any-return]
