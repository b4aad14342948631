# SPDX-License-Identifier: Apache-2.0
"""umockdev-wrapper python -m tests.faults.bed COMMAND…: runs the command in a testbed with one GPU,
/dev/dri/renderD128, prints its pid, and has udev say what comes by standard input, a word a line:
remove, wedged (the driver has to be rebound), add.
"""

from __future__ import annotations

import subprocess
import sys

from tests.pvrd.sensors.testbed import Testbed


def main() -> None:
    bed = Testbed()
    gpu = bed.add("platform", "fd000000.gpu", "", {}, {"DRIVER": "powervr"})
    bed.link(gpu, "driver", "/sys/bus/platform/drivers/powervr")
    numbers = {"dev": "226:128"}
    known = {"DEVNAME": "dri/renderD128", "MAJOR": "226", "MINOR": "128", "DEVTYPE": "drm_minor"}
    render = bed.add("drm", "renderD128", gpu, numbers, known)
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    print(child.pid, flush=True)
    for line in sys.stdin:
        word = line.strip()
        if word == "wedged":
            bed.property(render, "WEDGED", "rebind")
            bed.event(render, "change")
        else:
            bed.event(render, word)
    child.wait()


if __name__ == "__main__":
    main()
