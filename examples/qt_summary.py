#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Qt 6 window that sums up a text by pvrd. Its second button and its closing cancel the job.

    qt_summary.py [--model NAME] [--press] [TEXT]

The client runs in a thread of its own (writer.py); signals of Qt bring what it says to the window.
With --press the program presses its own button and prints the answer, too. It needs PySide6, pvrd
and dbus-next.
"""

from __future__ import annotations

import argparse
import signal

from PySide6.QtCore import Signal
from PySide6.QtGui import QCloseEvent
from PySide6.QtWidgets import (
    QApplication,
    QHBoxLayout,
    QPlainTextEdit,
    QPushButton,
    QVBoxLayout,
    QWidget,
)
from writer import Writer, arguments


class Window(QWidget):
    """The text above, the buttons, the summary below."""

    # From the client's thread: Qt queues them for the window's.
    piece = Signal(str)
    ended = Signal(str)

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self._args = args
        self._pieces = 0
        self._writer = Writer(self.piece.emit, self.ended.emit)
        self.piece.connect(self._append)
        self.ended.connect(self._stopped)
        self.setWindowTitle("Summary")
        self.resize(480, 320)
        self._text = QPlainTextEdit(args.text)
        self._button = QPushButton("Summarize")
        self._button.clicked.connect(self._start)
        self._cancel = QPushButton("Cancel", enabled=False)
        self._cancel.clicked.connect(self._writer.cancel)
        self._summary = QPlainTextEdit(readOnly=True)
        buttons = QHBoxLayout()
        buttons.addWidget(self._button, 1)
        buttons.addWidget(self._cancel)
        column = QVBoxLayout(self)
        column.addWidget(self._text)
        column.addLayout(buttons)
        column.addWidget(self._summary)

    def _start(self) -> None:
        self._summary.clear()
        self._pieces = 0
        self._busy(True)
        self._writer.start(self._text.toPlainText(), self._args.model, self._args.tokens)

    def _busy(self, busy: bool) -> None:
        self._button.setEnabled(not busy)
        self._cancel.setEnabled(busy)

    def press(self) -> None:
        """As if the button were pressed."""
        self._button.click()

    def closeEvent(self, event: QCloseEvent) -> None:
        """Of Qt: the window is being closed."""
        self._writer.close()
        event.accept()

    def _append(self, piece: str) -> None:
        self._summary.insertPlainText(piece)
        self._pieces += 1
        if self._pieces == self._args.cancel_at:
            self._cancel.click()
        if self._pieces == self._args.close_at:
            self.close()

    def _stopped(self, problem: str) -> None:
        if problem:
            self._summary.setPlainText(problem)
        self._busy(False)
        if self._args.press:
            print(self._summary.toPlainText(), flush=True)


def main() -> int:
    """The program."""
    args = arguments(__doc__ or "")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Qt's loop would not let Ctrl-C through
    app = QApplication([])
    window = Window(args)
    window.show()
    if args.press:
        window.press()
    return app.exec()


if __name__ == "__main__":
    raise SystemExit(main())
