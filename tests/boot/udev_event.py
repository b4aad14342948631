# SPDX-License-Identifier: Apache-2.0
"""Says on the netlink socket what udevd would say: KEY=VALUE… (SUBSYSTEM, ACTION, DEVPATH, …).

Containers have no udevd. The form is that of libudev's monitor: a header with a hash of the
subsystem, then the properties; only root may send it.
"""

from __future__ import annotations

import socket
import struct
import sys

UDEV_GROUP = 2
MAGIC = 0xFEEDCAFE
HEADER = struct.Struct("=8sIIIIIIII")


def murmur2(data: bytes) -> int:
    """The 32-bit hash that libudev's filters compare."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = len(data)
    whole = len(data) // 4 * 4
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def message(properties: dict[str, str]) -> bytes:
    """The datagram."""
    body = b"".join(f"{k}={v}".encode() + b"\0" for k, v in properties.items())
    subsystem = socket.htonl(murmur2(properties["SUBSYSTEM"].encode()))
    size = HEADER.size
    magic = socket.htonl(MAGIC)
    return HEADER.pack(b"libudev", magic, size, size, len(body), subsystem, 0, 0, 0) + body


def main() -> None:
    properties = dict(word.split("=", 1) for word in sys.argv[1:])
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15) as sock:  # KOBJECT_UEVENT
        sock.bind((0, 0))
        sock.sendto(message(properties), (0, UDEV_GROUP))


if __name__ == "__main__":
    main()
