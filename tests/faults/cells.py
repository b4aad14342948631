# SPDX-License-Identifier: Apache-2.0
"""What happens in a cell of the fault matrix: work, the fault of its row, what came of both."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from pvrd.client import Client
from tests.faults.daemon import ROOT, Daemon, Held, alive, children, queued, until
from tests.faults.place import Place
from tests.faults.rows import CONFIG, GONE, SLOW_MS, Fault
from tests.faults.strikes import strike
from tests.faults.work import BY_NAME, EOS, Ask, State, Work

# What a process may grow by in a cell: without a warm start what is compiled and loaded comes on
# top.
WARM_MIB, COLD_MIB = 48, 256
ENDS_S = 1.0  # until the end of file when pvrd or the bus is gone
ANSWERS_S = 10.0  # until a service that was started again answers


@dataclass
class Result:
    """A cell as the report shows it. Seconds."""

    fault: str
    state: str
    went_on_s: float = 0.0  # until each stream had something new
    bound_s: float = 0.0
    back_s: float = 0.0  # until the GPU served again, or the service answered
    device: str = ""  # what finished it
    reason: str = ""
    took_s: float = 0.0
    passed: bool = False
    error: str = ""


@dataclass
class Row:
    """A daemon under one kind of fault, and what it held before."""

    fault: Fault
    place: Place
    state: str = ""
    daemon: Daemon = field(init=False)
    before: Held = field(init=False)
    normal_s: float = 0.0  # from the start to the first results: with loading and prefill
    log_at: int = 0

    def __post_init__(self) -> None:
        fault, place = self.fault, self.place
        folder = place.folder / re.sub(r"\W+", "-", f"{fault.name} {self.state}".strip())
        while folder.exists():
            folder = folder.with_name(folder.name + "-again")
        folder.mkdir()
        place.warm(folder / "home")
        words = [f"gpu:{word}" for word in fault.words]
        words += ["gpu:armed", f"gpu:slow:{SLOW_MS}"] if fault.strike != "compile" else []
        config = {**CONFIG, "debug.faults": words}
        environment = {}
        if fault.strike == "wrong":
            config["gpu.check_rate"] = 1.0
            environment["PVRD_KERNELS"] = str(place.planted(self.state))
        self.daemon = Daemon(
            folder, place.models, config, environment=environment,
            preload=place.preload if fault.strike in ("full", "clock") else None,
            bed=fault.strike.startswith("udev"),
        )  # fmt: skip
        try:
            self.start()
        except BaseException:
            print(self.daemon.text()[-6000:])  # pytest shows it
            self.daemon.stop()
            raise

    def start(self) -> None:
        """Starts the daemon, has both workers do everything once, and notes what they hold."""
        began = time.monotonic()
        self.daemon.start()
        with self.daemon.client() as client:
            if self.fault.ends or self.fault.strike == "wrong":
                self.daemon.ready(client, "gpu")
                self.daemon.ready(client, "cpu")
            else:
                with ExitStack() as stack:
                    works = [self._warm(stack, client, kind) for kind in ("gpu", "cpu")]
                    for work in works:
                        work.start()
                    for work in works:
                        work.follow(work.over)
                        work.check(self.place.reference.ids)
            self.normal_s = max(self.normal_s, time.monotonic() - began)
            self.before = self.settled(client)

    def _warm(self, stack: ExitStack, client: Client, kind: str) -> Work:
        self.daemon.ready(client, kind)
        state = State("warm", texts=8, video=True)
        work = Work(client, state, self.place.reference.many, kind, self.place.reference.frames)
        stack.callback(work.close)
        work.open()
        return work

    def settled(self, client: Client) -> Held:
        """What is held once two looks are the same."""
        last = None
        while True:
            now = self.daemon.held(client)
            if not client.jobs() and last is not None and now.fds == last.fds:
                return now
            last = now
            select.select([], [], [], 0.05)

    def stop(self) -> None:
        """The end of the row; nothing was unforeseen."""
        self.daemon.stop()
        text = self.daemon.text()
        for bad in ("Traceback", "fault of its own", "a task failed"):
            assert bad not in text, text[-3000:]

    def news(self) -> str:
        """What the journal has got since the cell began."""
        return self.daemon.text()[self.log_at :]

    # -- a cell

    def cell(self, state: State) -> Result:
        """Work, the fault, and what came of both."""
        result = Result(self.fault.name, state.name)
        began = time.monotonic()
        self.log_at = len(self.daemon.text())
        if self.fault.ends:
            self._ended(state, result)
        elif self.fault.rude:
            self._beside(state, result)
        else:
            self._met(state, result)
        result.took_s = time.monotonic() - began
        result.passed = True
        return result

    def _work(self, client: Client, state: State) -> Work:
        reference = self.place.reference
        return Work(client, state, reference.asks(state), "auto", reference.frames)

    def _met(self, state: State, result: Result) -> None:
        """A fault of a device or of the system meets work."""
        fault, daemon = self.fault, self.daemon
        with ExitStack() as stack:
            client = stack.enter_context(daemon.client())
            before = daemon.ready(client, "gpu")
            work = self._work(client, state)
            stack.callback(work.close)
            work.open()
            if state.running:
                work.start()
                work.follow(work.begun if fault.strike != "wrong" else work.over)
            struck, queue = time.monotonic(), daemon.queue()
            undo = strike(fault, daemon, before["pid"], self.place.models, stack)
            if not state.running:
                work.start()
            work.follow(work.over)
            self._right(work, result)
            result.went_on_s = work.next_after(struck)
            result.bound_s = fault.deadline + self.normal_s + 1.0 + self._waited(queue)
            if state.running and fault.strike != "wrong":
                assert result.went_on_s <= result.bound_s, "it went on too late"
            met = state.name not in fault.quiet
            self._reason(client, work, result, met)
            undo()
            if fault.loses_gpu and met:
                daemon.ready(client, "gpu", before["generation"] + 1)
                result.back_s = time.monotonic() - struck
                bound = fault.deadline + self._finish(work) + self.normal_s + 8.0
                assert result.back_s <= bound + self._waited(queue), "the GPU came back too late"
            self._serves(client, result)
            work.close()
            cold = fault.strike == "wrong"
            daemon.settles(client, self.before, COLD_MIB if cold else WARM_MIB)

    def _waited(self, before: Mapping[int, float]) -> float:
        """Seconds that pvrd, its workers and this process stood in the queue for a CPU since: what
        a busy machine adds to every bound.
        """
        now = self.daemon.queue()  # less than before where threads have ended
        return sum(max(0.0, s - before.get(pid, 0.0)) for pid, s in now.items())

    @staticmethod
    def _finish(work: Work) -> float:
        every = [at for t in work.texts for at in t.at] + [at for v in work.videos for at in v.at]
        return max(every) - min(every)

    def _right(self, work: Work, result: Result) -> None:
        """Every token and frame, once, in order, right; where a kernel was wrong, up to there."""
        ids = dict(self.place.reference.ids)
        for text in work.texts:
            named = [e for e in text.events if e["type"] == "suspect"]
            if named:
                assert self.fault.strike == "wrong"
                since = min(e["since"] for e in named)
                assert text.ids[:since] == ids[text.ask][:since]
                # Of wrong tokens one may lead to the model's own end before the last one asked for.
                ended = text.ids[-1:] == [EOS] and text.events[-1]["reason"] == "stop"
                assert ended or len(text.ids) == text.ask.tokens
                ids[text.ask] = text.ids
        work.check(ids)
        ends = [t.events[-1]["device"] for t in work.texts]
        ends += [v.done[-1].device for v in work.videos]
        result.device = "+".join(sorted(set(ends)))

    def _reason(self, client: Client, work: Work, result: Result, met: bool) -> None:
        """The fault stands in status and journal, where there is one to see."""
        fault = self.fault
        told = [e for t in work.texts for e in t.events if "reason" in e]
        levels = [v.video.session.properties() for v in work.videos]

        def status() -> str:
            every = [client.properties(), client.statistics(), told, levels]
            return json.dumps(every, default=str)

        if not met:
            assert GONE not in self.news()
            return
        if fault.status:
            # A kernel may have been put aside before, on a machine where its test took too long.
            words = f'"(?!its self-test)([^"]*{fault.status}[^"]*)'
            found = until(lambda: re.search(words, status()), "the status")
            result.reason = found[1]
        if fault.journal:
            until(lambda: re.search(fault.journal, self.news()), f"{fault.journal} in the journal")
        if fault.strike in ("clock", "full"):
            assert GONE not in self.news(), self.news()

    def _serves(self, client: Client, result: Result) -> None:
        """A short answer by the GPU (the CPU where the GPU must not do it) is right."""
        reference = self.place.reference
        ask = Ask(reference.short.prompt, 8)
        wrong = self.fault.strike == "wrong"
        again = Work(client, BY_NAME["decode"], [ask], "auto" if wrong else "gpu")
        try:
            again.open()
            again.start()
            again.follow(again.over)
            again.check({ask: reference.ids[reference.short][:8]})
        finally:
            again.close()

    # -- clients

    def _beside(self, state: State, result: Result) -> None:
        """An ill-behaved client is there; another one's work has to be as ever."""
        daemon, reference = self.daemon, self.place.reference
        with ExitStack() as stack:
            client = stack.enter_context(daemon.client())
            counts = client.statistics()["jobs"]
            rude = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.rude", daemon.address, self.fault.rude,
                 state.name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            )  # fmt: skip
            stack.callback(self._end, rude)
            assert rude.stdin is not None
            assert rude.stdout is not None
            asks = [list(asdict(ask).values()) for ask in reference.asks(state)]
            rude.stdin.write(json.dumps(asks) + "\n")
            rude.stdin.flush()
            work = self._work(client, state)
            stack.callback(work.close)
            work.open()
            assert rude.stdout.readline() == "there\n"
            struck = time.monotonic()
            if self.fault.rude == "sit":
                rude.kill()
            work.start()
            work.follow(work.over)
            self._right(work, result)
            result.went_on_s = max(0.0, work.next_after(struck))
            result.bound_s = self.normal_s + 1.0
            if self.fault.rude != "sit":
                assert rude.stdout.readline() == "did\n"
            self._noticed(client, state, result, counts)
            rude.kill()
            work.close()
            daemon.settles(client, self.before, WARM_MIB)
            result.back_s = time.monotonic() - struck

    def _noticed(
        self, client: Client, state: State, result: Result, before: Mapping[str, int]
    ) -> None:
        """Counters and journal say what became of the ill-behaved client's sessions."""
        texts = state.texts if state.running else 0
        if self.fault.rude == "sit":
            until(lambda: client.statistics()["jobs"]["cancelled"] >= before["cancelled"] + texts,
                  "cancelled jobs")  # fmt: skip
            if not state.texts:
                return  # its slot socket was closed first: that is how every video ends
            result.reason = until(lambda: re.search(r"[^\n]*left the bus[^\n]*", self.news()),
                                  "who left in the journal")[0]  # fmt: skip
        elif self.fault.rude == "deaf" and texts:
            until(lambda: client.statistics()["jobs"]["failed"] >= before["failed"] + texts,
                  "failed jobs")  # fmt: skip
            result.reason = re.search(r"[^\n]*failed: SlowReader", self.news())[0]  # type: ignore[index]
        elif self.fault.rude == "garbage" and state.video:
            result.reason = until(lambda: re.search(r"[^\n]*broke the rules[^\n]*", self.news()),
                                  "the broken rule in the journal")[0]  # fmt: skip

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    # -- the end of all

    def _ended(self, state: State, result: Result) -> None:
        """The bus or pvrd goes away: the sessions end, nothing stays, a new pvrd answers."""
        daemon, reference = self.daemon, self.place.reference
        with daemon.client() as client:
            daemon.ready(client, "gpu")
            work = self._work(client, state)
            work.open()
            if state.running:
                work.start()
                work.follow(work.begun)
            workers = children(daemon.pid)
            assert len(workers) == 2
            struck, queue = time.monotonic(), daemon.queue()
            if self.fault.strike == "bus":
                daemon.kill_bus()
            else:
                os.kill(daemon.pid, signal.SIGKILL)
            work.follow(lambda: all(one.ended for one in (*self._started(work), *work.videos)))
            for text in work.texts:
                got = text.ids
                assert got == reference.ids[text.ask][: len(got)]
                last = text.events[-1] if text.events else {"type": "none"}
                assert last.get("error", "ShuttingDown") == "ShuttingDown"
            result.went_on_s = max(
                [one.ended - struck for one in (*self._started(work), *work.videos)], default=0.0
            )
            result.bound_s = ENDS_S + self._waited(queue)
            assert result.went_on_s <= result.bound_s, "the end of file came late"
            status = daemon.ended()
            assert status == (1 if self.fault.strike == "bus" else -signal.SIGKILL)
            until(lambda: not alive(workers), "the end of the workers")
            work.close()
        self._left(result)
        started, queue = time.monotonic(), queued([os.getpid()])
        daemon.start()
        with daemon.client() as client:
            client.properties()
            result.back_s = time.monotonic() - started
            assert result.back_s <= ANSWERS_S + self._waited(queue), "the service answered late"
            daemon.ready(client, "gpu")
            self._serves(client, result)
            daemon.settles(client, self.before, COLD_MIB)

    @staticmethod
    def _started(work: Work) -> list[Any]:
        return [text for text in work.texts if text.fd >= 0 or text.events]

    def _left(self, result: Result) -> None:
        """Nothing stays behind: no file in memory, no temporary one."""
        files = [f for f in self.daemon._files() if re.search(r"\.(new|part|tmp|\d+)$", f)]
        assert not files, files
        if self.fault.strike == "bus":
            result.reason = self.news().strip().splitlines()[-1]
            assert re.search(r"bus", self.news()), self.news()
