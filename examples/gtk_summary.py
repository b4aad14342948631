#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A GTK 4 window whose button sums up a text by pvrd. Closing the window cancels the job.

    gtk_summary.py [--model NAME] [--press] [TEXT]

The client blocks, so it runs in a thread of its own; pieces of the answer go to GTK's loop. With
--press it presses its own button and prints the answer, too. It runs in the Python that has
PyGObject and needs pvrd and dbus-next on its path.
"""

from __future__ import annotations

import argparse
import threading
from typing import Any

import gi

gi.require_version("Gtk", "4.0")
from gi.repository import GLib, Gtk  # noqa: E402

from pvrd.client import Client, TextSession  # noqa: E402
from pvrd.errors import PvrdError  # noqa: E402

TEXT = "pvrd owns the GPU of a machine and serves language models and video to desktop programs."
ASK = "Summarize this text in at most 20 words:\n\n"


class Window(Gtk.ApplicationWindow):  # type: ignore[misc]
    """The text above, the button, the summary below."""

    def __init__(self, app: Gtk.Application, args: argparse.Namespace) -> None:
        super().__init__(application=app, title="Summary", default_width=480, default_height=320)
        self._args = args
        self._closed = threading.Event()
        box = Gtk.Box(orientation=Gtk.Orientation.VERTICAL, spacing=8)
        for side in ("top", "bottom", "start", "end"):
            getattr(box, f"set_margin_{side}")(12)
        self._text = Gtk.TextView(wrap_mode=Gtk.WrapMode.WORD, vexpand=True)
        self._text.get_buffer().set_text(args.text)
        self._button = Gtk.Button(label="Summarize")
        self._button.connect("clicked", self._clicked)
        self._summary = Gtk.Label(wrap=True, xalign=0, vexpand=True, yalign=0)
        for widget in (self._text, self._button, self._summary):
            box.append(widget)
        self.set_child(box)
        self.connect("close-request", self._close)

    def _clicked(self, _button: Any) -> None:
        buffer = self._text.get_buffer()
        text = buffer.get_text(buffer.get_start_iter(), buffer.get_end_iter(), False)
        self._button.set_sensitive(False)
        self._summary.set_text("")
        threading.Thread(target=self._work, args=(text,), daemon=True).start()

    def press(self) -> None:
        """As if the button were pressed."""
        self._button.emit("clicked")

    def _close(self, _window: Any) -> bool:
        self._closed.set()
        return False

    def _work(self, text: str) -> None:
        try:
            settings = {"model": self._args.model}
            with Client() as client, client.open_text(settings) as session:
                self._write(session, text)
            GLib.idle_add(self._done, "")
        except PvrdError as error:
            GLib.idle_add(self._done, str(error))

    def _write(self, session: TextSession, text: str) -> None:
        messages = [{"role": "user", "content": ASK + text}]
        stream = session.chat(messages, {"max_tokens": self._args.tokens})
        for event in stream:
            if self._closed.is_set():
                stream.close()  # this cancels the job
                return
            if event.get("text"):
                GLib.idle_add(self._append, event["text"])

    def _append(self, piece: str) -> bool:
        self._summary.set_text(self._summary.get_text() + piece)
        return False

    def _done(self, problem: str) -> bool:
        if problem:
            self._summary.set_text(problem)
        self._button.set_sensitive(True)
        if self._args.press:
            print(self._summary.get_text(), flush=True)
        return False


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="the text model (the default one)")
    parser.add_argument("--tokens", type=int, default=64, help="of the summary (64)")
    parser.add_argument("--press", action="store_true", help="press the button, print the answer")
    parser.add_argument("text", nargs="?", default=TEXT)
    args = parser.parse_args()
    app = Gtk.Application(application_id="org.pvrd.Summary")

    def activate(_app: Any) -> None:
        window = Window(app, args)
        window.present()
        if args.press:
            window.press()

    app.connect("activate", activate)
    return int(app.run(None))


if __name__ == "__main__":
    raise SystemExit(main())
