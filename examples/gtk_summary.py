#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A GTK 4 window that sums up a text by pvrd. Its second button and its closing cancel the job.

    gtk_summary.py [--model NAME] [--press] [TEXT]

The client runs in a thread of its own (writer.py); what it says goes to GTK's loop. With --press
the program presses its own button and prints the answer, too. It runs in the Python that has
PyGObject and needs pvrd and dbus-next on its path.
"""

from __future__ import annotations

import argparse
from typing import Any

import gi

gi.require_version("Gtk", "4.0")
from gi.repository import GLib, Gtk  # noqa: E402
from writer import Writer, arguments  # noqa: E402


class Window(Gtk.ApplicationWindow):  # type: ignore[misc]
    """The text above, the buttons, the summary below."""

    def __init__(self, app: Gtk.Application, args: argparse.Namespace) -> None:
        super().__init__(application=app, title="Summary", default_width=480, default_height=320)
        self._args = args
        self._pieces = 0
        self._writer = Writer(
            lambda piece: GLib.idle_add(self._append, piece),
            lambda problem: GLib.idle_add(self._ended, problem),
        )
        box = Gtk.Box(orientation=Gtk.Orientation.VERTICAL, spacing=8)
        for side in ("top", "bottom", "start", "end"):
            getattr(box, f"set_margin_{side}")(12)
        self._text = Gtk.TextView(wrap_mode=Gtk.WrapMode.WORD, vexpand=True)
        self._text.get_buffer().set_text(args.text)
        self._button = Gtk.Button(label="Summarize", hexpand=True)
        self._button.connect("clicked", lambda _button: self._start())
        self._cancel = Gtk.Button(label="Cancel", sensitive=False)
        self._cancel.connect("clicked", lambda _button: self._writer.cancel())
        buttons = Gtk.Box(spacing=8)
        buttons.append(self._button)
        buttons.append(self._cancel)
        self._summary = Gtk.Label(wrap=True, xalign=0, vexpand=True, yalign=0)
        for widget in (self._text, buttons, self._summary):
            box.append(widget)
        self.set_child(box)
        self.connect("close-request", self._close)

    def _start(self) -> None:
        buffer = self._text.get_buffer()
        text = buffer.get_text(buffer.get_start_iter(), buffer.get_end_iter(), False)
        self._summary.set_text("")
        self._pieces = 0
        self._busy(True)
        self._writer.start(text, self._args.model, self._args.tokens)

    def _busy(self, busy: bool) -> None:
        self._button.set_sensitive(not busy)
        self._cancel.set_sensitive(busy)

    def press(self) -> None:
        """As if the button were pressed."""
        self._button.emit("clicked")

    def _close(self, _window: Any) -> bool:
        self._writer.close()
        return False

    def _append(self, piece: str) -> bool:
        self._summary.set_text(self._summary.get_text() + piece)
        self._pieces += 1
        if self._pieces == self._args.cancel_at:
            self._cancel.emit("clicked")
        if self._pieces == self._args.close_at:
            self.close()
        return False

    def _ended(self, problem: str) -> bool:
        if problem:
            self._summary.set_text(problem)
        self._busy(False)
        if self._args.press:
            print(self._summary.get_text(), flush=True)
        return False


def main() -> int:
    """The program."""
    args = arguments(__doc__ or "")
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
