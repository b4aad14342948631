# SPDX-License-Identifier: Apache-2.0
"""The one thread of a worker: it answers pvrd between slices and runs one slice at a time.

That the same thread does both is the point: a driver call that is stuck shows as a pong that does
not come. What need not be done before the next slice (words about tokens, a look at a frame and the
word about it) is done while the device works on that, if it goes there at once (engine/meanwhile).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import DeviceLost, InvalidArgument, PvrError
from engine.meanwhile import MEANWHILE
from engine.pace import LIMIT
from pvrd.workers import devices, protocol
from pvrd.workers.failures import PeerGone, fail, guard
from pvrd.workers.greeting import Open, greet
from pvrd.workers.models import Models
from pvrd.workers.neighbour import Neighbour
from pvrd.workers.picture_jobs import PictureTask
from pvrd.workers.query_jobs import QueryTask
from pvrd.workers.recorder import Recorder
from pvrd.workers.schedule import Scheduler, Task
from pvrd.workers.text_jobs import TextJobs
from pvrd.workers.timings import Meter, Metered
from pvrd.workers.video_jobs import VideoTask

EXIT_LOST = 1
EXIT_PROTOCOL = 3
PATIENT = ("ack", "ping", "count", "stats")  # messages that may wait for the end of a slice
QUICK = ("ack", "ping")  # that change nothing of what is left for later
LONG = ("load", "prepare", "inspect", "video.open")  # messages
MOST_OWED_S = 1.0
LEAST_SHARE = 0.01  # of the time: below it nothing would ever end

log = logging.getLogger("pvrd.worker")


class Worker:
    """A worker between its hello and its end."""

    def __init__(
        self,
        sock: socket.socket,
        kind: str,
        generation: int,
        config: Mapping[str, Any],
        opener: Open = devices.open_device,
    ) -> None:
        self._sock = sock
        self._kind = kind
        self._generation = generation
        self._config = config
        self._open = opener
        self._inbox: deque[protocol.Received] = deque()
        self._scheduler = Scheduler()
        self._videos: dict[str, VideoTask] = {}
        self._singles: dict[str, PictureTask | QueryTask] = {}  # by job: what cancelling fails
        self._meter = Meter()
        self._meter.urgent = self._urgent
        self._recorder = Recorder(self._meter)
        self._neighbour: Neighbour | None = None
        self._running: Task | None = None  # the last slice's
        self._owed = 0.0  # seconds that slices are owed for what took long beside them
        self._share = 1.0  # of the time, that slices may take
        self._parked = False
        self._rests = 0.0  # until then no slice runs
        self._meanwhile = False  # does the device's backend do what is left for later?
        self._outbox: list[bytes] = []
        self._failed: list[Task] = []  # at what was left for later

    def run(self) -> int:
        """Serves to the end; the exit status: 0 (peer gone), EXIT_LOST or EXIT_PROTOCOL."""
        try:
            backend, self._neighbour = greet(
                self._kind, self._generation, self._config, self._open, self.send
            )
            if backend is None:
                return self._wait_for_end()
            self._meanwhile = bool(getattr(backend, "meanwhile", False))
            backend = Metered(backend, self._meter)
            self._models = Models(backend, self._config, self.send, self.breathe)
            self._text = TextJobs(self._models, self._scheduler, self.send, self.soon)
            while True:
                self._turn()
        except (PeerGone, BrokenPipeError, ConnectionResetError):
            return 0
        except DeviceLost as e:
            return self._dying(str(e))
        except protocol.ProtocolError as e:
            log.error("pvrd-worker: %s", e)
            return EXIT_PROTOCOL
        finally:
            MEANWHILE.clear()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message to pvrd, after those for `soon`; blocks while the socket is full (pvrd
        always reads).
        """
        self._post()
        protocol.send(self._sock, message)

    def soon(self, message: Mapping[str, Any]) -> None:
        """As send, but while the device works on the next slice, where it does that at once."""
        if not self._meanwhile:
            self.send(message)
            return
        data = protocol.encode(message)
        if not self._outbox:
            MEANWHILE.add(self._post)
        self._outbox.append(data)

    def _post(self) -> None:
        messages, self._outbox = self._outbox, []
        for data in messages:
            protocol.send_raw(self._sock, data)

    def _later(self, task: Task, work: Callable[[], None]) -> None:
        """Does the rest of a task's work while the device works on the next slice."""

        def rest() -> bool:
            work()
            return True

        def run() -> None:
            if not guard(self.send, task.subject(), rest):
                self._failed.append(task)

        MEANWHILE.add(run)

    def breathe(self) -> None:
        """Answers pings in the middle of something long; all else that came waits for its turn."""
        self._receive()
        for received in list(self._inbox):
            if received.message["t"] == "ping":
                self._inbox.remove(received)
                self._answer_ping(received)

    def _urgent(self) -> bool:
        """Is there, in the middle of a slice, something that should not wait for its end?"""
        self._receive()
        if any(received.message["t"] not in PATIENT for received in self._inbox):
            return True
        return self._scheduler.dated(self._running)

    def _wait_for_end(self) -> int:
        """Without a device: answers pings until pvrd lets go."""
        while True:
            select.select([self._sock], [], [])
            self.breathe()
            while self._inbox:
                self._inbox.popleft().close()

    def _turn(self) -> None:
        """Messages, then at most one slice; blocks when there is neither. What takes long, as
        opening does, takes no more of the time than slices do: else clients that open and close
        sessions would leave nothing to others.
        """
        self._receive()
        while self._inbox:
            long = self._inbox[0].message["t"] in LONG
            if long and self._owed > 0 and not self._parked and self._scheduler.waiting():
                self.breathe()
                break
            received = self._inbox.popleft()
            if received.message["t"] not in QUICK:
                self._catch_up()
            began = time.monotonic()
            try:
                if not (long and self._closed(received)):
                    self._handle(received)
            finally:
                received.close()
            if long:
                self._owed = min(self._owed + time.monotonic() - began, MOST_OWED_S)
        pause = self._rests - time.monotonic()
        if self._parked or pause > 0:
            self._catch_up()
            select.select([self._sock], [], [], None if self._parked else pause)
            return
        task = self._scheduler.pick()
        if not getattr(task, "brisk", False) and self._catch_up():
            return  # things may have changed
        if task is None:
            self._meter.canary.rest()
            select.select([self._sock], [], [])
            return
        left, ran = len(MEANWHILE), MEANWHILE.ran
        self._slice(task)
        if left and MEANWHILE.ran == ran:  # it did not get to the device
            self._catch_up()

    def _catch_up(self) -> bool:
        """Does what was left for later; was anything?"""
        anything = bool(MEANWHILE)
        MEANWHILE.run()
        while self._failed:
            self._drop(self._failed.pop())
        return anything

    def _closed(self, received: protocol.Received) -> bool:
        """Is it a session that was closed again while it waited to be opened?"""
        session = received.message.get("session")
        return session is not None and any(
            later.message["t"] == "close" and later.message.get("session") == session
            for later in self._inbox
        )

    def _slice(self, task: Task) -> None:
        """One slice of a task, and what is known of it afterwards."""
        if self._neighbour is not None:
            self._neighbour.serve(task.priority)
        waited = self._meter.gate.waited
        began = time.monotonic()
        task.spans.begins(began)
        self._running, self._meter.pieces = task, 1
        goes_on = guard(self.send, task.subject(), task.step)
        ended = time.monotonic()
        spent = ended - began - (self._meter.gate.waited - waited)
        self._scheduler.charge(task, spent, self._meter.pieces)
        self._owed = max(0.0, self._owed - spent)
        if self._recorder.on:
            self._recorder.slice(task, began, ended)
        if not goes_on:
            self._drop(task)
        for one in {id(t): t for t in (task, *getattr(task, "beside", ()))}.values():
            if goes_on or one is not task:
                one.spans.waits("queue" if one.ready() else "input", ended)
        if self._share < 1:
            self._rests = ended + spent * (1 / self._share - 1)
        if (told := self._meter.canary.tell(ended)) is not None:
            self.soon(told)

    def _receive(self) -> None:
        """Takes in what lies in the socket."""
        while True:
            try:
                received = protocol.recv(self._sock, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if received is None:
                raise PeerGone
            self._inbox.append(received)

    def _handle(self, received: protocol.Received) -> None:
        message = received.message
        handler = self._HANDLERS.get(message["t"])
        if handler is None:
            return  # a later pvrd may say more than this worker knows
        subject: dict[str, Any] = {
            k: message[k] for k in ("job", "session", "model") if k in message
        }
        if "job" in subject or "session" in subject:
            subject.pop("model", None)
        if "job" in subject:
            subject.pop("session", None)
        guard(self.send, subject, lambda: handler(self, received))

    def _dying(self, reason: str) -> int:
        log.error("pvrd-worker: device lost: %s", reason)
        with contextlib.suppress(OSError, PeerGone, PvrError):  # what was done before stays done
            MEANWHILE.run()
        with contextlib.suppress(OSError):  # pvrd sees the end of file anyway
            self.send({"t": "dying", "reason": reason})
        return EXIT_LOST

    def _drop(self, task: Task) -> None:
        """A task that is over, well or not."""
        self._scheduler.remove(task)
        self._text.dropped(task)
        if isinstance(task, VideoTask):
            self._videos.pop(task.session, None)
        elif isinstance(task, PictureTask | QueryTask):
            self._singles.pop(task.job, None)
        task.close()

    # One method a message.

    def _answer_ping(self, received: protocol.Received) -> None:
        self.send({"t": "pong", "n": received.message.get("n", 0)})

    def _on_load(self, received: protocol.Received) -> None:
        self._text.roomy(lambda: self._models.load(received.message, received.fd()))

    def _on_unload(self, received: protocol.Received) -> None:
        model = str(received.message["model"])
        self._text.forget(model)
        self._models.unload(model)

    def _on_text(self, received: protocol.Received) -> None:
        carried = received.fd(1) if received.message.get("carried") else -1
        self._text.start(received.message, received.fd(), carried)

    def _on_prepare(self, received: protocol.Received) -> None:
        self._text.prepare(received.message)

    def _on_export(self, received: protocol.Received) -> None:
        message = received.message
        self._text.export(str(message["job"]), received.fd(), int(message.get("limit") or 0))

    def _on_ack(self, received: protocol.Received) -> None:
        self._text.ack(str(received.message["job"]), int(received.message["n"]))

    def _on_cancel(self, received: protocol.Received) -> None:
        job = str(received.message["job"])
        if (picture := self._singles.get(job)) is not None:
            self._drop(picture)
            fail(self.send, {"job": job}, "Cancelled", "The job was cancelled.")
        else:
            self._text.cancel(job)

    def _on_count(self, received: protocol.Received) -> None:
        message = received.message
        text = str(message.get("text", ""))
        if received.fds:
            text = protocol.read_all(received.fd()).decode()
        tokens = self._models.text(str(message["model"])).count(text)
        self.send({"t": "count", "job": message["job"], "tokens": tokens})

    def _on_inspect(self, received: protocol.Received) -> None:
        info = self._models.inspect(received.fd())
        self.send({"t": "inspected", "job": received.message["job"], "info": info})

    def _on_video_open(self, received: protocol.Received) -> None:
        message = received.message
        session = str(message["session"])
        if session in self._videos:
            raise InvalidArgument(f"There is a video session {session} already.")
        later = self._later if self._meanwhile else None
        task = self._text.roomy(
            lambda: VideoTask(self._models, message, received.fd(), self.send, later)
        )
        self._videos[session] = task
        self._scheduler.add(task)

    def _on_frame(self, received: protocol.Received) -> None:
        task = self._videos.get(str(received.message["session"]))
        if task is not None:  # else it was closed or failed meanwhile
            task.submit(received.message)

    def _on_picture(self, received: protocol.Received) -> None:
        message = received.message
        task = PictureTask(self._models, message, received.fd(0), received.fd(1), self.send)
        self._singles[task.job] = task
        self._scheduler.add(task)

    def _on_query(self, received: protocol.Received) -> None:
        task = QueryTask(self._models, received.message, received.fd(0), received.fd(1), self.send)
        self._singles[task.job] = task
        self._scheduler.add(task)

    def _on_close(self, received: protocol.Received) -> None:
        session = str(received.message["session"])
        if (task := self._videos.get(session)) is not None:
            self._drop(task)
        self._text.close_session(session)

    def _on_govern(self, received: protocol.Received) -> None:
        message = received.message
        LIMIT.slice_s = max(0.0, float(message.get("slice_ms") or 0.0)) / 1000
        LIMIT.scale = min(max(float(message.get("group_scale", 1.0)), 0.0), 1.0)
        self._share = min(max(float(message.get("share", 1.0)), LEAST_SHARE), 1.0)
        self._parked = bool(message.get("parked"))
        self._meter.gate.rhythm.pace(max(0.0, float(message.get("refresh_hz") or 0.0)))
        if self._share >= 1:
            self._rests = 0.0

    def _on_trace(self, received: protocol.Received) -> None:
        job = str(received.message["job"])
        if received.message.get("on"):
            self._recorder.begin(job)
        else:
            for told in self._recorder.end(job):
                self.send(told)

    def _on_stats(self, received: protocol.Received) -> None:
        with open("/proc/self/statm", encoding="ascii") as f:
            rss = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self.send(
            {
                "t": "stats",
                "counters": self._models.backend.counters(),
                "rss": rss,
                "jobs": len(self._scheduler),
                "models": self._models.keys(),
                "times": {k: round(1000 * s, 3) for k, s in self._meter.totals.items()},
            }
        )

    _HANDLERS: Mapping[str, Callable[[Worker, protocol.Received], None]] = {
        "ping": _answer_ping,
        "load": _on_load,
        "unload": _on_unload,
        "prepare": _on_prepare,
        "text": _on_text,
        "text.export": _on_export,
        "ack": _on_ack,
        "cancel": _on_cancel,
        "count": _on_count,
        "inspect": _on_inspect,
        "video.open": _on_video_open,
        "frame": _on_frame,
        "picture": _on_picture,
        "query": _on_query,
        "close": _on_close,
        "govern": _on_govern,
        "trace": _on_trace,
        "stats": _on_stats,
    }
