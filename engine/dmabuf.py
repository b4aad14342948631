# SPDX-License-Identifier: Apache-2.0
"""A memfd's pages as a dma-buf (the kernel's udmabuf), for devices that import nothing else."""

from __future__ import annotations

import fcntl
import os
import struct

NODE = "/dev/udmabuf"
# linux/udmabuf.h and linux/dma-buf.h
_CREATE, _CLOEXEC = 0x40187542, 1  # _IOW('u', 0x42, struct udmabuf_create)
_SYNC = 0x40086200  # _IOW('b', 0, struct dma_buf_sync)
_BOTH, _END = 3, 4  # read and write; the host's turn begins, or ends


class DmaBuf:
    """A dma-buf over the first `nbytes` (whole pages) of a memfd, which has to be sealed against
    shrinking and not against writing; `memfd` stays the caller's. Closes itself as a context.

    Raises:
        OSError: there is no udmabuf, it may not be used, or it does not take the memfd.
    """

    def __init__(self, memfd: int, nbytes: int, node: str = NODE) -> None:
        maker = os.open(node, os.O_RDWR | os.O_CLOEXEC)
        try:
            what = bytearray(struct.pack("=IIQQ", memfd, _CLOEXEC, 0, nbytes))
            self.fd = fcntl.ioctl(maker, _CREATE, what)
        finally:
            os.close(maker)
        try:
            self.to_host()  # a turn can only end that began
        except BaseException:
            os.close(self.fd)
            raise

    def to_host(self) -> None:
        """The host's turn begins: it sees what the device wrote."""
        fcntl.ioctl(self.fd, _SYNC, bytearray(struct.pack("=Q", _BOTH)))

    def to_device(self) -> None:
        """The host's turn ends: the device sees what it wrote."""
        fcntl.ioctl(self.fd, _SYNC, bytearray(struct.pack("=Q", _BOTH | _END)))

    def __enter__(self) -> DmaBuf:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
