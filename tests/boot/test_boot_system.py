# SPDX-License-Identifier: Apache-2.0
"""pvrd on a booted system: real systemd, bus and polkit, an unprivileged user as its client.

The tests are steps of one story and run in the order of this file, in one container.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytestmark = pytest.mark.boot

TREE = Path(__file__).resolve().parents[2]
# By `systemd-analyze security`, 0 to 10
UNITS = {"pvrd.service": 1.0, "pvrd-worker-gpu@.service": 0.8, "pvrd-worker-cpu@.service": 0.6}
PROMPT = "xyzzy plugh, said nobody to the journal"
LONG = 1500  # tokens whose lines do not fit into a pipe
WIDTH, HEIGHT, FRAMES = 36, 20, 3


def tiny_llama(path: Path) -> None:
    """A llama of two layers with random weights (seeded): what it writes is noise, but a text."""
    rng = np.random.default_rng(0)
    hidden, ffn, heads, vocab = 64, 128, 4, 320
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(2048)
    w.add_embedding_length(hidden)
    w.add_block_count(2)
    w.add_feed_forward_length(ffn)
    w.add_head_count(heads)
    w.add_head_count_kv(heads // 2)
    w.add_rope_dimension_count(hidden // heads)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(vocab)
    w.add_tokenizer_model("llama")
    letters = [b"<0x%02X>" % i for i in range(256)]
    words = [b"w%d" % i for i in range(vocab - 259)]
    w.add_token_list([b"<unk>", b"<s>", b"</s>", *letters, *words])
    w.add_token_scores([0.0] * vocab)
    w.add_token_types([2, 3, 3] + [6] * 256 + [1] * (vocab - 259))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    shapes = {"token_embd": (vocab, hidden), "output": (vocab, hidden)}
    for i in range(2):
        block = {
            "attn_q": (hidden, hidden),
            "attn_output": (hidden, hidden),
            "attn_k": (hidden // 2, hidden),
            "attn_v": (hidden // 2, hidden),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
        }
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
        for norm in ("attn_norm", "ffn_norm"):
            w.add_tensor(f"blk.{i}.{norm}.weight", np.ones(hidden, np.float32))
    w.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for name, (rows, columns) in shapes.items():
        data = rng.standard_normal((rows, columns)) / np.sqrt(columns)
        w.add_tensor(f"{name}.weight", data.astype(np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def clip() -> bytes:
    """A short y4m stream of a moving gradient."""
    out = [f"YUV4MPEG2 W{WIDTH} H{HEIGHT} F25:1 Ip A1:1 C420mpeg2\n".encode()]
    ramp = np.add.outer(np.arange(HEIGHT), np.arange(WIDTH))
    chroma = np.full((HEIGHT // 2, WIDTH // 2), 128, np.uint8).tobytes() * 2
    for i in range(FRAMES):
        out.append(b"FRAME\n" + ((ramp * 3 + 8 * i) % 200 + 16).astype(np.uint8).tobytes() + chroma)
    return b"".join(out)


@pytest.fixture(scope="module")
def installed(machine, collected):
    """The container with pvrd installed by `make install` from wheels that this machine builds."""
    shutil.copytree(collected, machine.folder / "wheels")
    said = machine.text("make", "-C", "/mnt/tree", "install", "WHEELS=/mnt/share/wheels")
    assert "systemctl enable --now pvrd.service" in said
    tiny_llama(machine.folder / "tiny.gguf")
    return machine


def workers(machine, kind: str = "cpu") -> list[str]:
    """The names of the worker units that run."""
    return [
        line.split()[0]
        for line in machine.text(
            "systemctl",
            "list-units",
            "--plain",
            "--no-legend",
            "--state=running",
            f"pvrd-worker-{kind}@*.service",
        ).splitlines()
    ]


def restarted(machine, before: int) -> bool:
    """Is pvrd active, restarted once since then?"""
    return (int(machine.show("NRestarts")), machine.show("ActiveState")) == (before + 1, "active")


def generate(count: int) -> list[str]:
    return [
        "pvrctl",
        "--json",
        "generate",
        "--model",
        "tiny",
        "--raw",
        "--temp",
        "0",
        "-n",
        str(count),
        PROMPT,
    ]


def test_active_means_that_the_name_answers(installed) -> None:
    installed.run("systemctl", "enable", "--now", "pvrd.service")
    assert installed.show("ActiveState") == "active"
    assert installed.answers()
    for _ in range(2):
        installed.run("systemctl", "restart", "pvrd.service")
        assert installed.answers()
    installed.run("systemctl", "stop", "pvrd.service")
    assert not installed.answers()
    assert workers(installed) == []


def test_first_call_starts_it_and_status_reads_well(installed, until) -> None:
    until("the CPU serves", lambda: installed.ctl("status")["state"] == "cpu")
    # the name answers first, then the unit counts as active
    until("the unit is active", lambda: installed.show("ActiveState") == "active")
    assert "CPU" in installed.run("pvrctl", "status", user="tester").stdout.decode()
    assert installed.run("pvrctl", "doctor", user="tester", check=False).returncode in (0, 1)


def sensors(installed) -> dict[str, dict[str, Any]]:
    """The sensors' rows by their names."""
    return {row["name"]: row for row in installed.ctl("stats")["sensors"]}


def test_sensors_work_in_the_sandbox(installed, until) -> None:
    """What the unit lets through: logind and its lock, /proc/pressure, udev's events."""
    seen = sensors(installed)
    assert seen["udev"]["source"] == "the kernel, without udevd"
    # There is none in a container; where its socket is, libudev listens to it.
    installed.run("mkdir", "-p", "/run/udev")
    installed.run("touch", "/run/udev/control")
    installed.run("systemctl", "restart", "pvrd.service")
    # It is active before it has asked the system bus.
    until("logind tells", lambda: sensors(installed)["idle"]["source"].startswith("logind"))
    seen = sensors(installed)
    assert seen["udev"]["source"] == "udev"
    assert seen["psi_cpu"]["source"] == "/proc/pressure/cpu"
    assert "psi_triggers" not in seen or "6.4" in seen["psi_triggers"]["source"]
    events = seen["udev"]["value"]
    assert isinstance(events, int), seen["udev"]
    installed.run(
        "python3", "/mnt/tree/tests/boot/udev_event.py", "ACTION=change", "SUBSYSTEM=drm",
        "DEVPATH=/devices/platform/none.gpu/drm/card9", "DEVNAME=/dev/dri/card9", "SEQNUM=1",
        "HOTPLUG=1",
    )  # fmt: skip
    until("udev is heard", lambda: sensors(installed)["udev"]["value"] > events)

    def locks() -> str:
        return installed.text(
            "busctl", "call", "org.freedesktop.login1", "/org/freedesktop/login1",
            "org.freedesktop.login1.Manager", "ListInhibitors",
        )  # fmt: skip

    until("it holds a lock", lambda: '"sleep" "pvrd"' in locks())
    assert '"delay"' in locks()


def test_polkit_keeps_models_from_users_and_gives_them_to_root(installed) -> None:
    add = ["pvrctl", "models", "add", "/mnt/share/tiny.gguf", "--name", "tiny"]
    refused = installed.run(*add, user="tester", check=False)
    assert refused.returncode == 4, refused.stderr
    installed.run(*add)
    assert "tiny" in [model["name"] for model in installed.ctl("models")]


def test_user_generates(installed) -> None:
    answer = installed.ctl(*generate(24)[2:])
    assert answer["device"] == "cpu"
    assert 0 < len(answer["token_ids"]) <= 24
    assert answer["restarts"] == 0


def test_the_cpu_worker_stands_back_and_comes_forward(installed) -> None:
    """In its sandbox, without any right but the unit's LimitNICE, where the machine grants that."""

    def stands(pid: str) -> tuple[int, int]:
        # After the name: field 3 and on of proc_pid_stat(5); nice and policy.
        fields = installed.text("cat", f"/proc/{pid}/stat").rpartition(")")[2].split()
        return int(fields[16]), int(fields[38])

    (unit,) = workers(installed)
    pid = installed.show("MainPID", unit)
    first = stands("1")[0]  # what a unit without a Nice= of its own begins with
    limits = installed.text("cat", f"/proc/{pid}/limits")
    granted = int(limits.partition("Max nice priority")[2].split()[0]) >= 20 - first
    for priority, more, policy in ((0, 19, 5), (11, 0, 3), (5, 5, 3), (11, 0, 3)):
        installed.ctl(*generate(8)[2:], "--priority", str(priority))
        nice = min(19, first + more) if granted else first
        assert stands(pid) == (nice, policy if granted else 3)


def test_user_enlarges(installed) -> None:
    done = installed.run("pvrctl", "upscale", "-", "-", user="tester", stdin=clip())
    header, _, frames = done.stdout.partition(b"\n")
    assert {f"W{2 * WIDTH}".encode(), f"H{2 * HEIGHT}".encode()} <= set(header.split())
    assert len(frames) == FRAMES * (len(b"FRAME\n") + 4 * WIDTH * HEIGHT * 3 // 2)


# Reads one token, waits for a line on standard input, reads the rest. What it does not read fills
# the pipe and parks the job, so that a job of this length is under way all that time.
CLIENT = f"""
import sys
sys.path.insert(0, "/usr/local/lib/pvrd")
from pvrd.client import Client
from pvrd.ctl.generate import Answer
with Client() as client, client.open_text({{"model": "tiny"}}) as session:
    answer = Answer(show=False)
    settings = {{"max_tokens": {LONG}, "temperature": 0.0}}
    for event in session.generate({PROMPT!r}, settings):
        answer.take(event)
        if answer.ids and sys.stdin is not None:
            print("one", flush=True)
            sys.stdin.readline()
            sys.stdin = None
record = answer.record(False)
print(record["device"], record["restarts"], *record["token_ids"])
"""


def test_killed_worker_is_replaced_and_the_text_goes_on(installed, until) -> None:
    whole = installed.ctl(*generate(LONG)[2:])
    assert (len(whole["token_ids"]), whole["restarts"]) == (LONG, 0)
    before = workers(installed)
    assert len(before) == 1
    with subprocess.Popen(
        installed.argv("python3", "-ISc", CLIENT, user="tester"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as job:
        assert job.stdout
        assert job.stdout.readline() == b"one\n"
        installed.run("systemctl", "kill", "--signal=KILL", *before)
        said, _ = job.communicate(b"go on\n", timeout=120)
    device, restarts, *ids = said.decode().split()
    assert (device, restarts) == ("cpu", "1")
    assert list(map(int, ids)) == whole["token_ids"]
    until("another worker runs", lambda: workers(installed) not in ([], before))


def test_killed_daemon_comes_back(installed, until) -> None:
    pid, restarts = installed.show("MainPID"), int(installed.show("NRestarts"))
    old = workers(installed)
    installed.run("systemctl", "kill", "--signal=STOP", *old)  # as if hung: it sees no end of file
    installed.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", "pvrd.service")
    until("pvrd is back", lambda: restarted(installed, restarts))
    assert installed.show("MainPID") != pid
    assert installed.answers()
    until("the hung worker is gone", lambda: not set(old) & set(workers(installed)))
    assert installed.ctl(*generate(8)[2:])["device"] == "cpu"


def test_silent_daemon_is_restarted_by_its_watchdog(installed, until) -> None:
    restarts = int(installed.show("NRestarts"))
    installed.run("systemctl", "kill", "--kill-who=main", "--signal=STOP", "pvrd.service")
    until("pvrd is back", lambda: restarted(installed, restarts))
    assert installed.ctl(*generate(8)[2:])["device"] == "cpu"
    said = "Watchdog timeout"
    until("the journal has it", lambda: said in installed.journal("--unit=pvrd.service"))


@pytest.mark.parametrize("unit", UNITS)
def test_exposure_on_the_system_is_small(installed, unit: str) -> None:
    said = installed.text("systemd-analyze", "security", "--no-pager", unit)
    figure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert figure
    assert float(figure[1]) <= UNITS[unit], said


# What each may do of tests/boot/probe.py; all else fails.
ABLE = {
    "pvrd.service": {"netlink", "bus", "state", "worker socket"},
    "pvrd-worker-gpu@.service": {"state", "dri", "memory"},
    "pvrd-worker-cpu@.service": {"state"},
}


@pytest.mark.parametrize("unit", UNITS)
def test_what_a_sandbox_keeps_out(installed, until, unit: str) -> None:
    """A probe in a unit of the same lines, but for the program and how it is supervised."""
    dropped = (
        "Exec", "Type=", "BusName=", "NotifyAccess=", "Watchdog", "Restart", "Standard",
        "RuntimeDirectory", "StopPropagated", "Before=", "Requires=", "Wants=", "After=",
    )  # fmt: skip
    text = installed.text("cat", f"/usr/local/lib/systemd/system/{unit}")
    lines = [line for line in text.splitlines() if not line.startswith(dropped)]
    at = lines.index("[Service]") + 1
    pid = installed.show("MainPID", "dbus.service")
    program = f"/usr/bin/python3 -I /mnt/tree/tests/boot/probe.py {pid}"
    lines[at:at] = ["Type=oneshot", f"ExecStart={program}", "StandardOutput=journal"]
    installed.run("mkdir", "-p", "/dev/dri")
    installed.run("touch", "/dev/dri/renderD128")
    name = f"probe-{unit.partition('.')[0].strip('@')}.service"
    probe = f"/run/systemd/system/{name}"
    installed.run("tee", probe, stdin="\n".join(lines).encode())
    installed.run("systemctl", "daemon-reload")
    installed.run("systemctl", "start", name)

    def said() -> str:
        return installed.text("journalctl", "-b", "-o", "cat", "-u", name).partition("PROBE ")[2]

    until("the journal has its words", lambda: "}" in said())  # it need not be as fast
    tried = json.loads(said().splitlines()[0])
    installed.run("rm", probe)
    assert {what for what, error in tried.items() if not error} == ABLE[unit], tried


def test_state_is_the_daemons_alone(installed) -> None:
    for folder in ("/var/lib/pvrd", "/var/cache/pvrd"):
        found = installed.text("find", folder, "-printf", "%u:%g %m %y %p\\n").splitlines()
        assert len(found) > 1, found
        for line in found:
            owner, mode, kind, _ = line.split(" ", 3)
            assert owner == "pvrd:pvrd", line
            assert (int(mode, 8) & 0o077, kind in "df") == (0, True), line


def test_a_new_version_over_one_that_runs(installed, until) -> None:
    """Installed again under a running job: the job's stream ends, nothing else is noticed."""
    session = subprocess.Popen(
        installed.argv("python3", "-ISc", CLIENT, user="tester"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with session:
        assert session.stdout
        assert session.stdout.readline() == b"one\n"
        installed.run("systemctl", "reload", "pvrd.service")
        before = installed.show("MainPID")
        # What an older version left is worth nothing or as much as before.
        for cached in installed.text("find", "/var/cache/pvrd", "-name", "*.pvrm").splitlines():
            installed.run("python3", "-c", f"f=open({cached!r},'r+b');f.seek(8);f.write(b'\\0')")
        said = installed.text("make", "-C", "/mnt/tree", "install", "WHEELS=/mnt/share/wheels")
        assert "has been restarted" in said
        _, error = session.communicate(b"go on\n", timeout=120)
        assert session.returncode != 0
        assert b"ShuttingDown" in error or b"daemon" in error, error
    assert installed.show("MainPID") != before
    until("the new one is active", lambda: installed.show("ActiveState") == "active")
    assert "tiny" in [model["name"] for model in installed.ctl("models")]
    assert installed.ctl(*generate(8)[2:])["device"] == "cpu"
    installed.run("systemctl", "reload", "pvrd.service")
    assert installed.answers()


def test_stop_is_clean(installed) -> None:
    installed.run("systemctl", "stop", "pvrd.service")
    assert installed.show("Result") == "success"
    assert workers(installed) == []


def test_journal_holds_no_traceback_and_no_prompt(installed) -> None:
    said = installed.journal("--all", "--output=export")
    assert "pvrd" in said
    assert "Traceback" not in said
    assert PROMPT not in said
    assert "xyzzy" not in said
    assert "code=dumped" not in said


def test_uninstall_leaves_nothing(installed) -> None:
    installed.run("make", "-C", "/mnt/tree", "uninstall", "PURGE=1")
    left = installed.text("find", "/", "-xdev", "-iname", "*pvrd*", "-not", "-path", "/mnt/*")
    assert left == ""
    assert installed.run("getent", "passwd", "pvrd", check=False).returncode == 2
