# SPDX-License-Identifier: Apache-2.0
"""Configuration: a table of keys, TOML files on top of each other, what SetConfig stored last.

An unknown key is a warning that names it, a bad value a ConfigError with file, key and rule.
"""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pvrd import fault_words
from pvrd.errors import InvalidArgument, StartError


class ConfigError(StartError):
    """A bad value or an unreadable file."""


@dataclass(frozen=True)
class Key:
    """One key: kind is bool, int, float, str or strs; `settable` by SetConfig."""

    kind: str
    default: Any
    settable: bool = False
    low: float = 0
    high: float = 1 << 53


KEYS: Mapping[str, Key] = {
    "gpu.enabled": Key("bool", True, True),
    "gpu.allow_software": Key("bool", False, True),
    "gpu.check_rate": Key("float", 0.01, True, high=1.0),
    "cpu.threads": Key("int", 0, True, high=1024),
    "cpu.reserve": Key("int", 1, True, high=1024),
    "models.paths": Key("strs", ()),
    "models.text": Key("str", "", True),
    "models.video": Key("str", "", True),
    "models.keep_s": Key("float", 600.0, True, high=1e9),
    "video.tile": Key("int", 0, True, high=4096),
    "video.overlap": Key("int", 16, True, high=256),
    "text.chunk": Key("int", 0, high=4096),
    "access.accounts": Key("strs", ()),
    "limits.sessions": Key("int", 16, True, low=1, high=1024),
    "limits.bytes": Key("int", 1 << 30, True),
    "limits.fds": Key("int", 128, True, low=8, high=4096),
    "limits.queue": Key("int", 16, True, high=1024),
    "limits.model_bytes": Key("int", 16 << 30, True),
    "limits.slow_reader_s": Key("float", 60.0, low=0.01, high=86400),
    "limits.shutdown_s": Key("float", 5.0, high=600),
    "deadlines.slice_s": Key("float", 0.0, high=3600),
    "deadlines.pipeline_s": Key("float", 0.0, high=3600),
    "deadlines.hello_s": Key("float", 10.0, low=0.01, high=3600),
    "deadlines.ping_s": Key("float", 2.0, low=0.01, high=3600),
    "workers.backoff_s": Key("float", 1.0, low=0.01, high=3600),
    "workers.backoff_max_s": Key("float", 60.0, low=0.01, high=86400),
    "workers.program": Key("strs", ()),
    "workers.gpu_socket": Key("str", ""),
    "workers.cpu_socket": Key("str", ""),
    "workers.idle_s": Key("float", 600.0, True, low=0.1, high=1e9),
    "governor.enabled": Key("bool", True, True),
    "governor.slice_ms": Key("float", 2.0, True, low=0.1, high=1000),
    "governor.slice_idle_ms": Key("float", 20.0, True, low=0.1, high=1000),
    "governor.battery_low": Key("float", 20.0, True, high=100),
    "governor.thermal_margin_c": Key("float", 5.0, True, high=100),
    "sensors.fdinfo": Key("bool", True, True),
    "sensors.system": Key("bool", True),
    "debug.faults": Key("strs", ()),
}

# What a worker is told in its hello; a change of one starts it anew.
WORKER_KEYS = frozenset(
    {"gpu.enabled", "gpu.allow_software", "gpu.check_rate", "cpu.threads", "cpu.reserve",
     "video.tile",
     "video.overlap", "text.chunk", "debug.faults", "workers.program", "workers.gpu_socket",
     "workers.cpu_socket"}
)  # fmt: skip


def check(key: str, value: Any) -> Any:
    """The value as it is kept.

    Raises:
        ValueError: a sentence that names the rule.
    """
    rule = KEYS[key]
    if rule.kind == "bool":
        if not isinstance(value, bool):
            raise ValueError(f"{key} is true or false")
        return value
    if rule.kind in ("int", "float"):
        whole = rule.kind == "int"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ValueError(f"{key} is {'an integer' if whole else 'a number'}")
        if not rule.low <= value <= rule.high:  # nor is nan
            raise ValueError(f"{key} lies in {rule.low} to {rule.high}, not {value}")
        return value if whole else float(value)
    if rule.kind == "strs":
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise ValueError(f"{key} is a list of strings")
        if key == "debug.faults":
            _check_faults(value)
        return tuple(value)
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{key} is a string without control characters")
    return value


def _check_faults(specs: Iterable[str]) -> None:
    for spec in specs:
        try:
            fault_words.parse(spec)
        except ValueError as e:
            raise ValueError(f"debug.faults: {e}") from None


@dataclass(frozen=True)
class Config:
    """Values in force. The accessors say the type; all keys of KEYS are there."""

    values: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    def flag(self, key: str) -> bool:
        """A bool."""
        return bool(self.values[key])

    def whole(self, key: str) -> int:
        """An int."""
        return int(self.values[key])

    def number(self, key: str) -> float:
        """A float."""
        return float(self.values[key])

    def text(self, key: str) -> str:
        """A str."""
        return str(self.values[key])

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        return tuple(self.values[key])


MOST_BYTES = 1 << 20  # of a file
SECTIONS = frozenset(key.partition(".")[0] for key in KEYS)


@dataclass(frozen=True)
class Paths:
    """Where things lie: the system's places, or their XDG twins on a user or private bus."""

    config: Path
    state: Path  # added models, stored configuration
    cache: Path
    shared_models: tuple[Path, ...] = field(default=())

    @property
    def models(self) -> Path:
        """Where added models go."""
        return self.state / "models"

    @property
    def stored(self) -> Path:
        """What SetConfig wrote."""
        return self.state / "config.toml"

    @classmethod
    def find(cls, system: bool, environment: Mapping[str, str] | None = None) -> Paths:
        """The places for the system bus, or for another one."""
        env = os.environ if environment is None else environment

        def first(name: str, default: str) -> Path:
            # systemd gives a list with colons when there are several.
            return Path(env.get(name, "").split(":")[0] or default)

        if system:
            return cls(
                Path("/etc/pvrd"),
                first("STATE_DIRECTORY", "/var/lib/pvrd"),
                first("CACHE_DIRECTORY", "/var/cache/pvrd"),
                (Path("/usr/local/share/pvrd/models"), Path("/usr/share/pvrd/models")),
            )
        home = Path(env.get("HOME") or "/")

        def xdg(name: str, default: str) -> Path:
            value = Path(env.get(name, ""))
            return (value if value.is_absolute() else home / default) / "pvrd"

        shared = [xdg("XDG_DATA_HOME", ".local/share") / "models"]
        for folder in (env.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(":"):
            if folder.startswith("/"):
                shared.append(Path(folder) / "pvrd" / "models")
        return cls(
            xdg("XDG_CONFIG_HOME", ".config"),
            xdg("XDG_STATE_HOME", ".local/state"),
            xdg("XDG_CACHE_HOME", ".cache"),
            tuple(shared),
        )


def load(paths: Paths, file: Path | None = None) -> Config:
    """Reads the files; `file` instead of the usual ones (it has to be there then).

    Raises:
        ConfigError: one sentence with file, key and rule.
    """
    if file is not None:
        files = [file]
    else:
        files = [paths.config / "pvrd.toml"]
        with contextlib.suppress(OSError):
            files += sorted((paths.config / "pvrd.toml.d").glob("*.toml"))
    values: dict[str, Any] = {key: rule.default for key, rule in KEYS.items()}
    warnings: list[str] = []
    for path in [*files, paths.stored]:
        for key, value in _read(path, needed=file is not None and path == file).items():
            if key in SECTIONS:
                raise ConfigError(f"{path}: {key} is a section, [{key}], not a value")
            if key not in KEYS:
                warnings.append(f"{path}: there is no key {key}")
                continue
            try:
                values[key] = check(key, value)
            except ValueError as e:
                raise ConfigError(f"{path}: {e}") from None
    return Config(values, tuple(warnings))


def _read(path: Path, needed: bool) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
        tables = tomllib.loads(data.decode("utf-8"))
    except FileNotFoundError:
        if needed:
            raise ConfigError(f"{path}: there is no such file") from None
        return {}
    except (OSError, ValueError, RecursionError) as e:
        why = e.strerror if isinstance(e, OSError) else str(e)
        if isinstance(e, RecursionError):
            why = "it is nested too deeply"
        raise ConfigError(f"{path}: {why}") from None
    flat = {}
    for section, content in tables.items():
        if isinstance(content, dict):
            flat.update({f"{section}.{key}": value for key, value in content.items()})
        else:
            flat[section] = content
    return flat


def changed(old: Config, new: Config) -> set[str]:
    """Keys whose values differ."""
    return {key for key in KEYS if old.values[key] != new.values[key]}


def store(paths: Paths, values: Mapping[str, Any]) -> None:
    """Adds checked values to what SetConfig stored before; whole or not at all.

    Raises:
        OSError: the folder cannot be written.
        ConfigError: what was stored before is damaged.
    """
    merged = {k: v for k, v in _read(paths.stored, needed=False).items() if k in KEYS}
    merged.update(values)
    lines = ["# Written by pvrd for SetConfig; read last."]
    for section in sorted({key.split(".")[0] for key in merged}):
        lines.append(f"[{section}]")
        for key in sorted(k for k in merged if k.split(".")[0] == section):
            lines.append(f"{key.split('.')[1]} = {toml_value(merged[key])}")
    paths.state.mkdir(parents=True, exist_ok=True)
    temporary = paths.stored.with_suffix(".new")
    try:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        temporary.replace(paths.stored)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def toml_value(value: Any) -> str:
    """A value as TOML: bool, int, float, printable str, list of str."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return json.dumps(str(value), ensure_ascii=False)


def settable(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values for SetConfig, checked.

    Raises:
        InvalidArgument: an unknown or fixed key, a bad value.
    """
    out = {}
    for key, value in given.items():
        if key not in KEYS:
            raise InvalidArgument(f"there is no key {key[:64]!r}; there are {_names(KEYS)}")
        if not KEYS[key].settable:
            able = _names(k for k, rule in KEYS.items() if rule.settable)
            raise InvalidArgument(f"{key} stands in the configuration file alone; to set: {able}")
        try:
            out[key] = check(key, value)
        except ValueError as e:
            raise InvalidArgument(str(e)) from None
    return out


def _names(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys))
