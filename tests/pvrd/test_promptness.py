# SPDX-License-Identifier: Apache-2.0
"""The control process asks for short slices, and to stand in front, for itself alone."""

from __future__ import annotations

import subprocess
import sys

from tests.buses import ROOT

CODE = """
import os, subprocess, sys
from pvrd.promptness import AUTOGROUP, NICE, SLICE_NS, stand_in_front
RESET = 0x40000000
if "batch" in sys.argv:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    assert not stand_in_front() and os.sched_getscheduler(0) == os.SCHED_BATCH
    raise SystemExit
def slice():
    lines = open("/proc/self/sched").read().splitlines()
    return [int(line.split()[-1]) for line in lines if line.startswith(("slice", "se.slice"))]
nice, usual = os.getpriority(os.PRIO_PROCESS, 0), slice()
assert stand_in_front()
assert os.sched_getscheduler(0) == os.SCHED_OTHER | RESET
assert os.getpriority(os.PRIO_PROCESS, 0) in ((nice, NICE) if nice == 0 else (nice,))
if os.geteuid() == 0 and nice == 0:
    assert os.getpriority(os.PRIO_PROCESS, 0) == NICE
    # Of this session, or of one that is somebody else's; empty where the kernel makes no groups.
    group = AUTOGROUP.read_text().split() if AUTOGROUP.exists() else []
    if group and "session" in sys.argv:
        assert int(group[-1]) == NICE
if usual and slice() != usual:  # kernels before 6.12 have one slice for all
    assert slice() == [SLICE_NS]
child = os.fork()
if not child:
    alike = os.sched_getscheduler(0) == os.SCHED_OTHER and slice() == usual
    os._exit(not (alike and os.getpriority(os.PRIO_PROCESS, 0) == nice))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_it_asks_for_short_slices_and_its_children_do_not() -> None:
    subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, check=True, timeout=60)


def test_a_session_of_its_own_stands_in_front_as_a_whole() -> None:
    command = [sys.executable, "-c", CODE, "session"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60, start_new_session=True)


def test_a_class_that_somebody_gave_stays() -> None:
    subprocess.run([sys.executable, "-c", CODE, "batch"], cwd=ROOT, check=True, timeout=60)


def test_where_the_kernel_refuses_nothing_is_left_to_children() -> None:
    """Without the flag they would inherit a nice value that is ours alone."""
    code = """
import os
from pvrd import promptness
promptness._SETATTR = dict.fromkeys(promptness._SETATTR, 9999)  # no such call
nice = os.getpriority(os.PRIO_PROCESS, 0)
assert not promptness.stand_in_front()
assert os.getpriority(os.PRIO_PROCESS, 0) == nice
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
