# SPDX-License-Identifier: Apache-2.0
"""The soak: five minutes of benchmarks/soak.py, and its arithmetic."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from benchmarks.soak import trend
from tests.faults.daemon import ROOT

MINUTES = 5


def test_noise_is_flat_and_a_leak_is_not() -> None:
    draw = random.Random(1)
    noise = [100 + draw.uniform(-5, 5) for _ in range(600)]
    found = trend(noise)
    assert found.least < 0 < found.most
    leak = trend([x + i / 20 for i, x in enumerate(noise)])
    assert leak.least > 15
    assert leak.rise == pytest.approx(24, rel=0.2)  # of the four fifths that count


def test_few_samples_say_nothing() -> None:
    assert trend([1.0, 2.0]).rise == 0.0
    assert trend([]).mean == 0.0


@pytest.mark.long
@pytest.mark.bus
@pytest.mark.gpu
def test_five_minutes_of_everything() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--minutes", str(MINUTES)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
