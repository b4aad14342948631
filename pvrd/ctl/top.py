# SPDX-License-Identifier: Apache-2.0
"""Shows devices, processes and jobs as they are now, again and again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pvrd.ctl import common, errors, jobs, output
from pvrd.ctl.status import duration

if TYPE_CHECKING:
    import argparse

    from pvrd.client import Client

FIRST_S = 0.5  # rates and percentages need two looks
HOME = "\x1b[H\x1b[J"  # to the corner, and clear what is below


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pvrctl top`."""
    parser.add_argument(
        "-n", "--count", type=common.at_least(1), metavar="N", help="so many times, then end"
    )
    parser.add_argument(
        "-d", "--delay", type=delay, default=2.0, metavar="S", help="seconds between two looks (2)"
    )
    parser.add_argument("-a", "--all", action="store_true", help="jobs of all users")


def delay(text: str) -> float:
    """A pause."""
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise ValueError
    return value


delay.__name__ = "number of seconds from 0.1 to 3600"


def run(args: argparse.Namespace) -> int:
    """Runs `pvrctl top`; Ctrl-C is its usual end."""
    screen = not args.json and os.isatty(1) and os.environ.get("TERM") not in (None, "", "dumb")
    try:
        with common.client(args) as client:
            looks = Looks(client, args.all)
            looks.take()
            done = 0
            pause = min(FIRST_S, args.delay)
            while args.count is None or done < args.count:
                time.sleep(pause)
                pause = args.delay
                record = looks.take()
                if args.json:
                    output.emit_json(record)
                else:
                    text = words(record)
                    if screen:
                        text = HOME + fitting(text, os.get_terminal_size(1))
                    sys.stdout.write(("\n" if done and not screen else "") + text)
                    sys.stdout.flush()
                done += 1
    except KeyboardInterrupt:
        if args.count is not None:
            raise
    return errors.OK


def fitting(text: str, size: os.terminal_size) -> str:
    """What of it a terminal of this size shows without scrolling its beginning away."""
    if not size.columns or not size.lines:  # it does not tell
        return text
    lines = [line[: size.columns] for line in text.splitlines()[: size.lines]]
    return "\n".join(lines) + ("\n" if len(lines) < size.lines else "")


class Looks:
    """One look after the other; what is a rate is one since the look before."""

    def __init__(self, client: Client, all_users: bool) -> None:
        self._client = client
        self._all = all_users
        self._before: dict[str, dict[str, float]] = {}
        self._at = time.monotonic()
        self._processes: dict[int, Any] = {}

    def take(self) -> dict[str, Any]:
        """The state of things: version, state, uptime_s, devices, processes, jobs."""
        client = self._client
        state, counters = client.properties(), client.statistics()
        now = time.monotonic()
        past, self._at = max(now - self._at, 1e-3), now
        decision = state.get("Decision") or {}
        pids = {"pvrd": client.daemon_pid()}
        devices = []
        for device in state.get("Devices", ()):
            kind = str(device.get("kind", ""))
            devices.append(self._device(device, counters.get(kind) or {}, past))
            if device.get("pid"):
                pids[f"worker {kind}"] = int(device["pid"])
        return {
            "version": state.get("Version", ""),
            "state": state.get("State", ""),
            "reason": decision.get("reason") or state.get("Reason", ""),
            "uptime_s": counters.get("uptime_s", 0.0),
            "devices": devices,
            "processes": self._look_at(pids),
            "jobs": client.jobs(self._all),
        }

    def _device(
        self, device: Mapping[str, Any], counters: Mapping[str, Any], past: float
    ) -> dict[str, Any]:
        kind = str(device.get("kind", ""))
        times = counters.get("times_ms") or {}
        now = {
            "busy": float(times.get("compute", 0.0)) / 1000,
            "tokens": float(counters.get("tokens", 0)),
            "frames": float(counters.get("frames", 0)),
            "slices": float(counters.get("submissions", 0)),
        }
        before = self._before.get(kind, now)
        self._before[kind] = now
        # A new worker counts from the beginning.
        rates = {key: max(0.0, value - before[key]) / past for key, value in now.items()}
        return {
            "kind": kind,
            "state": device.get("state", ""),
            "name": device.get("name", ""),
            "busy": round(min(1.0, rates["busy"]), 3),
            "tokens_per_s": round(rates["tokens"], 2),
            "frames_per_s": round(rates["frames"], 2),
            "slices_per_s": round(rates["slices"], 1),
        }

    def _look_at(self, pids: Mapping[str, int]) -> list[dict[str, Any]]:
        """psutil's figures; a process that is gone or hidden is left out."""
        import psutil

        found = []
        for name, pid in pids.items():
            try:
                process = self._processes.get(pid) or psutil.Process(pid)
                with process.oneshot():
                    known = {
                        "name": name, "pid": pid, "cpu_percent": process.cpu_percent(None),
                        "rss_bytes": process.memory_info().rss, "threads": process.num_threads(),
                        "nice": process.nice(),
                    }  # fmt: skip
            except psutil.Error:
                self._processes.pop(pid, None)
                continue
            self._processes[pid] = process
            found.append(known)
        return found


def words(record: Mapping[str, Any]) -> str:
    """A look for people."""
    reason = f": {record['reason']}" if record["reason"] else ""
    up = duration(float(record["uptime_s"]))
    parts = [f"pvrd {record['version']}, {record['state']}{reason}; up {up}\n"]
    rows = [
        [
            str(d["kind"]), str(d["state"]), f"{100 * d['busy']:.0f} %",
            output.rate(d["tokens_per_s"]), output.rate(d["frames_per_s"]),
            output.rate(d["slices_per_s"]), str(d["name"] or "-"),
        ]
        for d in record["devices"]
    ]  # fmt: skip
    head = ("DEVICE", "STATE", "BUSY", "TOKENS/S", "FRAMES/S", "SLICES/S", "NAME")
    parts.append(output.table(rows, head))
    rows = [
        [
            str(p["pid"]), str(p["name"]), f"{p['cpu_percent']:.0f} %", output.size(p["rss_bytes"]),
            str(p["threads"]), str(p["nice"]),
        ]
        for p in record["processes"]
    ]  # fmt: skip
    parts.append(output.table(rows, ("PID", "PROCESS", "CPU", "MEMORY", "THREADS", "NICE")))
    parts.append(jobs.words(record["jobs"]) if record["jobs"] else "No sessions and no jobs.\n")
    return output.plain("\n".join(parts))
