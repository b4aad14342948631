# SPDX-License-Identifier: Apache-2.0
"""The other commands as processes, usage, no daemon at all, and how light pvrctl is."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pvrd.ctl.main import COMMANDS, main, parse
from pvrd.ctl.output import Progress, plain, rate, sentence, size, table
from pvrd.ctl.status import decision_words, duration, sensor_words

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.bus
def test_status(fake) -> None:
    done = fake.run("status")
    assert done.code == 0
    lines = done.text.splitlines()
    assert lines[0].split(maxsplit=1) == ["pvrd", "9.9 on a private bus, up 1 h 1 min"]
    assert [line.split()[0] for line in lines] == ["pvrd", "State", "Why", "GPU", "CPU", "Jobs"]
    assert "Fake ?[31mCPU (ready)" in done.text
    record = fake.run("status", "--json").json
    assert (record["version"], record["state"]) == ("9.9", "cpu")
    assert record["bus"] == fake.address
    assert record["jobs"] == {"running": 1, "waiting": 2}


@pytest.mark.bus
def test_devices(fake) -> None:
    done = fake.run("devices", "-v")
    assert done.code == 0
    assert "cpu" in done.text
    assert "gpu: None." in done.text
    assert [device["kind"] for device in fake.run("--json", "devices").json] == ["gpu", "cpu"]


@pytest.mark.bus
def test_models(fake, tmp_path: Path) -> None:
    assert re.search(r"^echo \* +text +1.0 MB", fake.run("models").text, re.M)
    assert fake.run("models", "list").text == fake.run("models").text
    assert [m["name"] for m in fake.run("models", "--json").json] == ["echo", "luma", "tiny"]
    file = tmp_path / "A Model 名.gguf"
    file.write_bytes(b"GGUFxxxx")
    done = fake.run("models", "add", "--licence", "CC0", "--replace", str(file))
    name = fake.expect("add")["name"]
    assert re.fullmatch(r"a-model-[0-9a-f]{6}", name)
    assert done.text == f"Added {name} (8 B).\n"
    assert fake.run("models", "add", "--name", "x", str(file), "--json").json["kind"] == "text"
    file.write_bytes(b"junk")
    assert fake.run("models", "add", str(file)).failed(5) == "It is none."
    assert "config.json" in fake.run("models", "add", str(tmp_path)).failed(5)
    os.mkfifo(tmp_path / "fifo.gguf")
    assert "regular" in fake.run("models", "add", str(tmp_path / "fifo.gguf")).failed(5)
    assert "No such file" in fake.run("models", "add", "/no/such").failed(5)
    assert fake.run("models", "remove", "tiny").text == "Removed tiny.\n"
    assert fake.run("models", "remove", "missing").failed(5)


@pytest.mark.bus
def test_config(fake) -> None:
    assert "cpu.threads = 0\n" in fake.run("config").text
    assert fake.run("config", "get", "workers.backoff_s").text == "1.5\n"
    done = fake.run(
        "config", "set", "gpu.allow_software=TRUE", "cpu.threads=2", "models.text= a b",
        'models.paths=["/x y"]', "workers.backoff_s=2",
    )  # fmt: skip
    assert done.code == 0
    assert fake.expect("config") == {
        "gpu.allow_software": True, "cpu.threads": 2, "models.text": "a b",
        "models.paths": ["/x y"], "workers.backoff_s": 2.0,
    }  # fmt: skip
    assert fake.run("config", "get", "cpu.threads", "--json").json == {"cpu.threads": 2}
    assert "no setting 'no.such'" in fake.run("config", "get", "no.such").failed(5)
    assert "no setting" in fake.run("config", "set", "no.such=1").failed(5)
    assert "true or false" in fake.run("config", "set", "gpu.allow_software=7").failed(5)
    for value in ("x", str(1 << 64), str(-(1 << 63) - 1)):
        assert "whole number" in fake.run("config", "set", f"cpu.threads={value}").failed(5)
    for value in ("/a", "[" * 3000):
        assert "list of texts" in fake.run("config", "set", f"models.paths={value}").failed(5)
    assert "KEY=VALUE" in fake.run("config", "set", "cpu.threads").failed(2)


@pytest.mark.bus
def test_stats(fake) -> None:
    text = fake.run("stats").text
    assert re.search(r"^jobs.waiting +2$", text, re.M)
    assert re.search(r"^rss_bytes +12345678 \(12.3 MB\)$", text, re.M)
    assert fake.run("stats", "--json").json["uptime_s"] == 3661.5


@pytest.mark.bus
def test_doctor_asks_the_daemon(fake) -> None:
    found = {entry["check"]: entry for entry in fake.run("doctor", "--json").json}
    assert found["daemon"]["what"] == "pvrd 9.9 answers."
    assert found["acceleration"]["ok"] is False
    assert "no_icd" not in fake.run("doctor").text
    assert found["icd"]["ok"] is False


def run_without_daemon(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    env["DBUS_SYSTEM_BUS_ADDRESS"] = env["DBUS_SESSION_BUS_ADDRESS"] = f"unix:path={tmp_path}/none"
    command = [sys.executable, "-m", "pvrd.ctl.main", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("where", [[], ["--bus", "user"], ["--bus=system"], ["--bus=unix:path=/"]])
def test_no_daemon(tmp_path: Path, where: list[str]) -> None:
    done = run_without_daemon(tmp_path, *where, "status")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith("pvrctl: There is no daemon to talk to: ")


def test_a_bus_that_is_none(tmp_path: Path) -> None:
    done = run_without_daemon(tmp_path, "--bus", "nonsense", "status")
    assert done.returncode == 3
    assert "'nonsense' is no bus" in done.stderr


def test_doctor_without_a_daemon(tmp_path: Path) -> None:
    done = run_without_daemon(tmp_path, "doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "The daemon does not answer." in done.stdout
    done = run_without_daemon(tmp_path, "--json", "doctor")
    assert json.loads(done.stdout)[0]["ok"] is False


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["nonsense"], ["--nonsense"], ["generate"], ["generate", "a", "b"], ["upscale", "a"],
        ["generate", "--device", "tpu", "x"], ["generate", "-n", "0", "x"],
        ["generate", "--temp", "hot", "x"], ["models", "add"], ["models", "nonsense"],
        ["config", "set"], ["status", "x"], ["generate", "--js", "x"],
    ],
)  # fmt: skip
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == 2
    said = capsys.readouterr()
    assert "usage: pvrctl" in said.err
    found = json.loads(said.out)
    assert (found["error"], found["exit_code"]) == ("Usage", 2)
    assert found["message"] in said.err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([command, "--help"], ["--help"]):
        with pytest.raises(SystemExit) as caught:
            parse(arguments)
        assert caught.value.code == 0
        assert command in capsys.readouterr().out


def test_global_options_stand_anywhere() -> None:
    for arguments in (
        ["--bus", "user", "--json", "models", "remove", "x"],
        ["models", "--bus", "user", "remove", "--json", "x"],
        ["models", "remove", "x", "--json", "--bus=user"],
    ):
        args = parse(arguments)
        assert (args.bus, args.json, args.action, args.name) == ("user", True, "remove", "x")
    args = parse(["generate", "--", "--json"])
    assert (args.prompt, args.json) == ("--json", False)


@pytest.mark.bus
def test_status_is_light(fake) -> None:
    code = (
        "import sys; from pvrd.ctl.main import main; code = main(['status']);"
        "heavy = {'numpy', 'vulkan', 'engine', 'kernels', 'cffi', 'PIL'} & set(sys.modules);"
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=fake.env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")


def cpu_of(command: list[str], env: dict[str, str]) -> float:
    """User and system seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.bus
def test_status_costs_little_more_than_what_it_stands_on(fake) -> None:
    base = [sys.executable, "-c", "import argparse, asyncio, dbus_next, json"]
    status = [sys.executable, "-m", "pvrd.ctl.main", "status"]
    pairs = [(cpu_of(base, fake.env), cpu_of(status, fake.env)) for _ in range(5)]
    assert min(cost for _, cost in pairs) < 2.5 * min(cost for cost, _ in pairs)


def test_words_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 123456)] == ["0 B", "999 B", "1.0 kB", "123 kB"]
    assert size(5e12) == "5.0 TB"
    assert [rate(n) for n in (0.123, 12.34, 123.4)] == ["0.12", "12.3", "123"]
    assert [duration(n) for n in (0, 59, 3661, 90061)] == ["0 s", "59 s", "1 h 1 min", "1 d 1 h"]
    assert table([("a", "bb"), ("ccc", "d")], ("X", "Y")) == "X    Y\na    bb\nccc  d\n"
    assert table([]) == ""
    assert plain("a\x07\x9b\tß\n") == "a??\tß\n"
    assert sentence("an option\n is  wrong") == "An option is wrong."
    assert [sentence(s) for s in ("pvrd ends!", "models.text is", "a_b.png\x07 is")] == [
        "pvrd ends!", "models.text is.", "a_b.png? is.",
    ]  # fmt: skip


def test_progress_is_for_terminals_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (False, True):
        meter = Progress("work", shown=shown)
        meter.update(1, 2, "frames")
        meter.update(2, 2)
        meter.clear()
        text = capsys.readouterr().err
        assert bool(text) is shown
    assert "\rwork [##########..........] 1/2 frames" in text
    assert text.endswith("\r")


COMPLETION = """
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_pvrctl
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["pvrctl", "st"], ["status", "stats"]),
        (["pvrctl", "--bus", "u"], ["user"]),
        (["pvrctl", "generate", "--device", ""], ["auto", "gpu", "cpu"]),
        (["pvrctl", "models", ""], ["list", "add", "remove"]),
        (["pvrctl", "config", "s"], ["set"]),
        (["pvrctl", "upscale", "--sc"], ["--scale"]),
    ],
)
def test_completion(words: list[str], found: list[str]) -> None:
    script = str(ROOT / "tools/completion/pvrctl.bash")
    command = ["bash", "-c", COMPLETION, "bash", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (found, "")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_completion_and_manual_know_every_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([command, "--help"])
    options = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    manual = (ROOT / "docs/pvrctl.1").read_text().replace("\\-", "-")
    for name in ("pvrctl.bash", "_pvrctl"):
        script = (ROOT / "tools/completion" / name).read_text()
        assert not {option for option in options if option not in script}
    known = set(re.findall(r"--[a-z][a-z0-9-]*", manual))
    assert options <= known


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_help_into_a_closed_standard_output_fails_quietly(option: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "pvrd.ctl.main", option]
    done = subprocess.run(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"")


def test_status_says_what_the_governor_decided_and_by_which_sensors() -> None:
    decision = {
        "device": "gpu", "slice_ms": 2.0, "group_scale": 0.5, "precision": "low", "share": 0.25,
        "parked": False, "reason": "the battery is at 9 %",
    }  # fmt: skip
    text = decision_words(decision)
    assert text == (
        "work on the GPU, slices of 2 ms, 50 % of their workgroups, 25 % of the GPU's time, "
        "new jobs with 4-bit weights and small networks"
    )
    assert decision_words({**decision, "parked": True}) == "nothing runs"
    low = "new jobs with 4-bit weights and small networks"
    on_cpu = f"work on the CPU, 50 % of the work a slice, {low}"
    assert decision_words({**decision, "device": "cpu"}) == on_cpu
    assert decision_words(decision, "cpu") == on_cpu  # there is no GPU
    usual = {"device": "gpu", "slice_ms": 10.0, "group_scale": 1.0, "share": 1.0, "parked": False}
    assert decision_words(usual, "cpu") == "work on the CPU"
    assert decision_words(usual, "starting") == "work on the GPU, slices of 10 ms"
    rows = [
        {"name": "battery", "value": 9.0, "source": "UPower", "unit": "%"},
        {"name": "on_battery", "value": True, "source": "UPower", "unit": ""},
        {"name": "others_gpu", "value": 0.25, "source": "fdinfo", "unit": "share"},
        {"name": "idle", "value": "unknown", "source": "no logind", "unit": ""},
        {"name": "lid_closed", "value": "unknown", "source": "no logind", "unit": ""},
    ]
    lines = sensor_words(rows).splitlines()
    assert [line.split() for line in lines[2:5]] == [
        ["battery", "9.0", "%", "UPower"], ["on_battery", "yes", "UPower"],
        ["others_gpu", "25", "%", "fdinfo"],
    ]  # fmt: skip
    assert lines[5] == "unknown: idle, lid_closed (no logind)"
    assert sensor_words([]) == ""
