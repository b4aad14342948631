# SPDX-License-Identifier: Apache-2.0
"""pvrctl: what a person touches. One command a file; each has `arguments(parser)` and `run(args) ->
exit code`."""

import os
import signal
import sys

_program = os.path.basename(sys.argv[0]) in ("pvrctl", "-m")
if _program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until main() takes it, Ctrl-C ends the program without a word: there is nothing to undo yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
