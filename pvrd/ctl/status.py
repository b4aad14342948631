# SPDX-License-Identifier: Apache-2.0
"""Shows what the daemon does and on which device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, errors, output

if TYPE_CHECKING:
    import argparse

_STATES = {
    "gpu": "work runs on the GPU",
    "cpu": "work runs on the CPU",
    "starting": "starting",
    "failed": "no worker, nothing can be done",
}


_JOBS = ("running", "waiting", "done", "failed")


def arguments(parser: argparse.ArgumentParser) -> None:
    """`pvrctl status` has the global options alone."""


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl status`."""
    with common.client(args) as client:
        state = client.properties()
        counters = client.statistics()
        bus = client.bus
    record = {
        "version": state.get("Version", ""),
        "bus": bus,
        "state": state.get("State", ""),
        "reason": state.get("Reason", ""),
        "protocols": state.get("Protocols", {}),
        "devices": state.get("Devices", []),
        "uptime_s": counters.get("uptime_s", 0),
        "sessions": counters.get("sessions", 0),
        "jobs": counters.get("jobs", {}),
        "decision": state.get("Decision", {}),
        "sensors": counters.get("sensors", []),
    }
    if args.json:
        output.emit_json(record)
    else:
        sys.stdout.write(output.plain(words(record)))
    return errors.OK


def words(record: dict[str, Any]) -> str:
    """The status for people."""
    jobs = record["jobs"]
    where = record["bus"] if record["bus"] in ("user", "system") else "a private"
    lines = [
        ("pvrd", f"{record['version']} on {where} bus, up {duration(float(record['uptime_s']))}"),
        ("State", _STATES.get(record["state"], record["state"])),
    ]
    if record["reason"]:
        lines.append(("Why", record["reason"]))
    for device in record["devices"]:
        lines.append((str(device.get("kind", "")).upper(), device_words(device, record["reason"])))
    lines.append(
        (
            "Jobs",
            ", ".join(f"{jobs.get(key, 0)} {key}" for key in _JOBS)
            + f"; sessions: {record['sessions']}",
        )
    )
    if record["decision"]:
        lines.append(("Governor", decision_words(record["decision"], record["state"])))
        if (reason := record["decision"].get("reason")) and reason != record["reason"]:
            lines.append(("", f"because {reason}"))
    return output.table(lines) + sensor_words(record["sensors"])


def decision_words(decision: dict[str, Any], state: str = "gpu") -> str:
    """What the governor lets work take, in a line. state: the daemon's; what the governor would let
    a GPU do is not said where there is none.
    """
    if decision.get("parked"):
        return "nothing runs"
    gpu = decision.get("device") != "cpu" and state != "cpu"
    parts = [f"work on the {'GPU' if gpu else 'CPU'}"]
    if gpu:
        parts.append(f"slices of {decision.get('slice_ms', 0):g} ms")
    scale, share = (float(decision.get(key, 1.0)) for key in ("group_scale", "share"))
    if scale < 1.0:
        parts.append(f"{100 * scale:.0f} % of {'their workgroups' if gpu else 'the work a slice'}")
    if share < 1.0 and gpu:
        parts.append(f"{100 * share:.0f} % of the GPU's time")
    if decision.get("precision") == "low":
        parts.append("new jobs with 4-bit weights and small networks")
    return ", ".join(parts)


def sensor_words(sensors: list[dict[str, Any]]) -> str:
    """What the governor sees: known values with their sources, then why others are unknown."""
    known = [row for row in sensors if row.get("value") != "unknown"]
    rows = [(str(r["name"]), _value(r), str(r.get("source", ""))) for r in known]
    out = "\n" + output.table(rows, ("SENSOR", "VALUE", "SOURCE")) if rows else ""
    why: dict[str, list[str]] = {}
    for row in sensors:
        if row.get("value") == "unknown":
            why.setdefault(str(row.get("source", "")), []).append(str(row["name"]))
    for source, names in why.items():
        out += f"unknown: {', '.join(names)} ({source})\n"
    return out


def _value(row: dict[str, Any]) -> str:
    value, unit = row.get("value"), str(row.get("unit", ""))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if unit == "share":
            return f"{100 * value:.0f} %"
        return f"{value:.1f} {unit}".strip()
    return str(value)


def device_words(device: dict[str, Any], known: str = "") -> str:
    """A device in a line; a reason that is known already is not said again."""
    reason = str(device.get("reason") or "")
    text = str(device.get("name") or (reason if reason != known else "") or "none")
    if device.get("present") and device.get("software") and device.get("kind") == "gpu":
        text += ", a CPU in disguise"
    return f"{text} ({device.get('state', 'unknown')})"


def duration(seconds: float) -> str:
    """A time for people: the two largest units."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    shown = [f"{value} {unit}" for value, unit in parts if value][:2]
    return " ".join(shown) or "0 s"
