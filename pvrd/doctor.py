# SPDX-License-Identifier: Apache-2.0
"""Turns facts into words: what is accelerated, what is not, why, and how to mend it.

`diagnose` is a pure function of the snapshot that pvrd/facts.py takes. The findings about the
machine come from pvrd/doctor_machine.py, those about the daemon stand here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pvrd.doctor_machine import Finding, drivers, hardware
from pvrd.facts import Facts

__all__ = ["Finding", "daemon_facts", "diagnose"]


def diagnose(facts: Facts) -> list[Finding]:
    """All findings in the order of the way from the bus to the chip; the last one says what is
    accelerated."""
    findings = [daemon(facts), *hardware(facts), *drivers(facts), *running(facts)]
    return [*findings, *notes(facts), acceleration(facts, findings)]


def daemon_facts(state: Mapping[str, Any], notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Facts.daemon from the Manager's properties and GetDiagnostics: version, state, reason, code,
    devices, pids, …"""
    devices = [dict(device) for device in state.get("Devices", ())]
    gpu: dict[str, Any] = next((device for device in devices if device.get("kind") == "gpu"), {})
    properties = gpu.get("properties") or {}
    quarantined = gpu.get("quarantined") or properties.get("quarantined") or {}
    if isinstance(quarantined, str):
        quarantined = quarantined.split()
    if not isinstance(quarantined, Mapping):
        quarantined = dict.fromkeys(quarantined, "")
    return {
        "version": state.get("Version", "?"),
        "state": state.get("State", ""),
        "reason": state.get("Reason", ""),
        "code": "" if gpu.get("present") else gpu.get("code", ""),
        "devices": devices,
        "pids": [device["pid"] for device in devices if device.get("pid")],
        "quarantined": {str(name): str(reason) for name, reason in quarantined.items()},
        "times": str(properties.get("times", "")),
        "notes": list(notes),
    }


def daemon(facts: Facts) -> Finding:
    """Is there a daemon to ask?"""
    if facts.daemon is None:
        return Finding(
            "daemon",
            False,
            "The daemon does not answer.",
            facts.daemon_error,
            "Start it: `sudo systemctl start pvrd` where it is installed, else `pvrd --bus user`.",
        )
    state = facts.daemon.get("state", "")
    version = facts.daemon.get("version", "?")
    if state == "failed":
        return Finding(
            "daemon",
            False,
            f"pvrd {version} runs, but can do no work.",
            "; ".join(
                f"{device.get('kind', '?')}: {device['reason']}"
                for device in facts.daemon.get("devices", ())
                if device.get("reason")
            ),
            "Read `journalctl -u pvrd -b`; a worker that cannot start says there why.",
        )
    return Finding("daemon", True, f"pvrd {version} answers.")


def running(facts: Facts) -> Iterator[Finding]:
    """What only the running daemon, or /proc, knows."""
    if (software := _software(facts)) is not None:
        yield software
    yield _holder(facts)
    state = facts.daemon or {}
    if state.get("code") == "failed":
        yield Finding(
            "worker",
            False,
            "The GPU worker could not start.",
            str(state.get("reason", "")),
            "Read `journalctl -u 'pvrd-worker-gpu@*' -b`.",
        )
    if facts.daemon is not None:
        yield _kernels(facts.daemon)


def _software(facts: Facts) -> Finding | None:
    state, gpu = facts.daemon or {}, _device(facts, "gpu")
    if gpu and gpu.get("software"):
        return Finding(
            "software",
            None,
            f"The GPU in use, {gpu.get('name', '?')}, is a CPU in disguise.",
            "The configuration has `[gpu] allow_software = true`; it is slower than the CPU path.",
            "Remove that line, it is meant for tests.",
        )
    if state.get("code") == "software_only":
        return Finding(
            "software",
            False,
            "Vulkan offers only a device that computes on the CPU.",
            str(state.get("reason", "")),
            "Install the driver of the GPU; for tests alone: `[gpu] allow_software = true`."
            if facts.gpus
            else "Nothing to mend without a GPU; for tests: `[gpu] allow_software = true`.",
        )
    return None


def _holder(facts: Facts) -> Finding:
    state = facts.daemon or {}
    if state.get("code") == "busy":
        return Finding(
            "holder",
            False,
            "Another pvrd holds the device.",
            str(state.get("reason", "")),
            "Use that one (`pvrctl --bus system` or `--bus user`), or stop it.",
        )
    own = set(state.get("pids", ()))
    others = [f"{name} ({pid})" for pid, name in facts.holders if pid not in own]
    return Finding(
        "holder",
        True,
        "No other pvrd holds the device.",
        f"Other users of the render node: {', '.join(others)}." if others else "",
    )


def _kernels(state: Mapping[str, Any]) -> Finding:
    bad = dict(state.get("quarantined", ()))
    if bad:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in bad.items() if reason)
        return Finding(
            "kernels",
            False,
            f"Quarantined on this device: {', '.join(bad)}.",
            (f"{reasons}. " if reasons else "") + "Other kernels, or the CPU, do their work.",
            "Update the Vulkan driver: each new version is tested anew.",
        )
    times = str(state.get("times", ""))
    why = f"Measured, the fastest first: {times}." if times else ""
    return Finding("kernels", True, "No kernel is quarantined.", why)


def notes(facts: Facts) -> Iterator[Finding]:
    """What the daemon says of itself in GetDiagnostics and no check above has said; all of a topic
    in one finding."""
    topics: dict[str, list[Mapping[str, Any]]] = {}
    for note in (facts.daemon or {}).get("notes", ()):
        if note.get("topic") not in ("daemon", "gpu"):
            topics.setdefault(str(note.get("topic")), []).append(note)
    for topic, said in topics.items():
        bad = [note for note in said if note.get("status") != "ok"]
        failed = any(note.get("status") == "failed" for note in bad)
        yield Finding(
            topic,
            False if failed else None if bad else True,
            " ".join(_sentence(str(note.get("message", ""))) for note in bad or said),
            "",
            " ".join(_sentence(str(note["remedy"])) for note in bad if note.get("remedy")),
        )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _device(facts: Facts, kind: str) -> Mapping[str, Any] | None:
    for device in (facts.daemon or {}).get("devices", ()):
        if device.get("kind") == kind and device.get("present", True):
            found: Mapping[str, Any] = device
            return found
    return None


def acceleration(facts: Facts, findings: Sequence[Finding]) -> Finding:
    """The sum of it: is work done on a GPU, and on which?"""
    gpu, cpu = _device(facts, "gpu"), _device(facts, "cpu")
    blocker = next(
        (finding for finding in findings if finding.ok is False and finding.check != "daemon"), None
    )
    reason = str((facts.daemon or {}).get("reason", "")) or (blocker.what if blocker else "")
    if gpu and (facts.daemon or {}).get("state") == "cpu":
        return Finding(
            "acceleration",
            None,
            f"For now work runs on the CPU; the GPU {gpu.get('name', '?')} is well.",
            reason,
            "It comes back by itself; `pvrctl status` says why it is not used.",
        )
    if gpu and not gpu.get("software"):
        return Finding(
            "acceleration", True, f"Text and video run on the GPU {gpu.get('name', '?')}."
        )
    if gpu:
        return Finding(
            "acceleration",
            False,
            f"Nothing is accelerated: {gpu.get('name', '?')} computes on the CPU.",
            "A software device was allowed.",
            "See the check software.",
        )
    if cpu:
        return Finding(
            "acceleration",
            False,
            f"Nothing is accelerated: text and video run on the CPU {cpu.get('name', '')}".rstrip()
            + ".",
            reason,
            f"See the check {blocker.check}." if blocker else "",
        )
    if facts.daemon is not None:
        return Finding(
            "acceleration", False, "No device is ready.", reason, "See the check daemon."
        )
    if blocker:
        return Finding(
            "acceleration",
            False,
            "Without a mend, pvrd will do all work on the CPU.",
            reason,
            f"See the check {blocker.check}.",
        )
    return Finding(
        "acceleration",
        None,
        "Nothing seen from here stands in the way of the GPU.",
        "Only a running daemon can tell for sure.",
        "Start pvrd and ask again.",
    )
