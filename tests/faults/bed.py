# SPDX-License-Identifier: Apache-2.0
"""umockdev-wrapper python -m tests.faults.bed COMMAND…: runs the command in a testbed with one GPU,
card0 and renderD128, prints its pid, and has udev say what comes by standard input, a word a line:
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

    def node(name: str, minor: int) -> str:
        known = {"DEVNAME": f"dri/{name}", "MAJOR": "226", "MINOR": str(minor)}
        known["DEVTYPE"] = "drm_minor"
        path = bed.add("drm", name, gpu, {"dev": f"226:{minor}"}, known)
        bed.link(path, "device", "../fd000000.gpu")  # as the kernel has it
        return path

    card, render = node("card0", 0), node("renderD128", 128)
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    print(child.pid, flush=True)
    for line in sys.stdin:
        word = line.strip()
        if word == "wedged":
            bed.property(card, "WEDGED", "rebind")  # it is the card that says so
            bed.event(card, "change")
        else:
            bed.event(render, word)
    child.wait()


if __name__ == "__main__":
    main()
